"""Carry records of steps from the engine to a request's outputs, see `frontend.traces`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_seams.wrapping import wrap


def apply() -> None:
    """Make the front end of one of our models take step records off the engine's outputs."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    wrap(OutputProcessor, "process_outputs", _take_records)
    wrap(RequestState, "_new_completion_output", _add_traces)


def _take_records(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import live_traces, traces

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        live = live_traces.live_traces_of(self)
        traces.take_records(self.request_states, engine_core_outputs, live)
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _add_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import traces

    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = original(self, *args, **kwargs)
        traces.add_traces(self, completion)
        return completion

    return _new_completion_output
