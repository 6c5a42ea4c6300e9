"""Wrap what makes answers of the engine's outputs, before the first traced request enters it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from vllm_dllm.frontend import traces
from vllm_dllm.vllm_seams.wrapping import wrap


def apply() -> None:
    """Take records of steps off the engine's outputs, see `frontend.traces`."""
    wrap(OutputProcessor, "process_outputs", _take_records)
    wrap(RequestState, "_new_completion_output", _add_traces)


def _take_records(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        live = getattr(self, traces.LIVE_TRACES, None)
        traces.take_records(self.request_states, engine_core_outputs, live)
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _add_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = original(self, *args, **kwargs)
        traces.add_traces(self, completion)
        return completion

    return _new_completion_output
