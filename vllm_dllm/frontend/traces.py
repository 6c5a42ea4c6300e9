"""What a request asked to know of its steps, on its outputs.

    output.outputs[0].step_maps         with ``diffusion_return_step_maps``
    output.outputs[0].diffusion_trace   with ``diffusion_trace``, a `tracing.trace.Trace`
    output.outputs[0].diffusion_replay  with ``diffusion_replay``, a `tracing.trace.Replay`, once
                                        the answer is finished

All of them speak of the whole output so far, also where an output has only what is new.
"""

from __future__ import annotations

from typing import Any

from vllm_dllm.settings.request import Asked
from vllm_dllm.tracing.assembly import Assembly
from vllm_dllm.tracing.recorder import is_labelled, taken_off
from vllm_dllm.tracing.records import records
from vllm_dllm.tracing.trace import Replay

STEP_MAPS, TRACE, REPLAY = "step_maps", "diffusion_trace", "diffusion_replay"
# The attribute of vLLM's ``RequestState`` that has a request's `Assembly`.
_ASSEMBLY = "dllm_assembly"


def take_records(request_states: dict[str, Any], outputs: list[Any]) -> None:
    """Take the records off outputs of the engine, which are then as vLLM knows them.

    Args:
        request_states: vLLM's ``RequestState`` of each running request, by id.
        outputs: vLLM's ``EngineCoreOutput``.
    """
    for output in outputs:
        if not is_labelled(output.new_logprobs):
            continue
        output.new_logprobs, rows, (asked, length) = taken_off(output.new_logprobs)
        state = request_states.get(output.request_id)
        if state is None:  # it was aborted
            continue
        if not hasattr(state, _ASSEMBLY):
            setattr(state, _ASSEMBLY, Assembly(state.prompt_len, Asked(asked)))
        getattr(state, _ASSEMBLY).add(records(rows, length))


def add_traces(state: Any, completion: Any) -> None:
    """Put what a request asked for on one of its outputs.

    Args:
        state: vLLM's ``RequestState``.
        completion: vLLM's ``CompletionOutput``, made from it.
    """
    assembly = getattr(state, _ASSEMBLY, None)
    if assembly is None:
        return
    token_ids = list(state.detokenizer.output_token_ids)
    trace = assembly.put_out(token_ids)
    if assembly.asked & Asked.STEP_MAPS:
        setattr(completion, STEP_MAPS, trace.step_maps)
    if assembly.asked & Asked.TRACE:
        setattr(completion, TRACE, trace)
    if assembly.asked & Asked.REPLAY and completion.finish_reason is not None:
        setattr(completion, REPLAY, Replay.of(trace, token_ids))
