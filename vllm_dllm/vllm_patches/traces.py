"""Records of steps on their way from the engine to a request's outputs, see `frontend.traces`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.wrapping import wrap


def apply() -> None:
    """Let the front end of one of our models take the records of steps off the engine's outputs."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    wrap(OutputProcessor, "process_outputs", _take_records)
    wrap(RequestState, "_new_completion_output", _add_traces)


def _take_records(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend.traces import take_records

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        take_records(self.request_states, engine_core_outputs)
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _add_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend.traces import add_traces

    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = original(self, *args, **kwargs)
        add_traces(self, completion)
        return completion

    return _new_completion_output
