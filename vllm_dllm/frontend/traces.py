"""Attach what a request asked to know about its steps to its outputs.

    output.outputs[0].step_maps         with ``diffusion_return_step_maps``
    output.outputs[0].diffusion_trace   with ``diffusion_trace``, a `tracing.trace.Trace`
    output.outputs[0].diffusion_replay  with ``diffusion_replay``, a `tracing.trace.Replay`, once
                                        the answer is finished

All of them describe the whole output so far, even if an output carries only what is new. Over HTTP
they are in each choice of an answer that is not streamed; the fields of `Replay` individually.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm_dllm.settings.resolution import StepDetails
from vllm_dllm.tracing.trace import Assembly, Replay
from vllm_dllm.vllm_seams.channels import records as channel

if TYPE_CHECKING:
    from vllm_dllm.tracing.live import LiveTraces

# The attribute of vLLM's output processor that holds the `LiveTraces` of a server that shows them.
LIVE_TRACES = "dllm_live_traces"


def take_records(
    request_states: dict[str, Any], outputs: list[Any], live: LiveTraces | None = None
) -> None:
    """Take the records off the engine's outputs, which then have the form that vLLM expects.

    `live` receives the records of every request if the server shows them.
    """
    for output in outputs:
        sent = channel.take_records(output)
        state = request_states.get(output.request_id)
        if sent is None or state is None:  # it was aborted
            continue
        details, records = StepDetails(sent[0]), sent[1]
        # Handled separately: what the server shows must not reach an answer.
        if live is not None and details & StepDetails.LIVE:
            live.add(state, records)
        if not details & ~StepDetails.LIVE:
            continue
        if not hasattr(state, "dllm_assembly"):
            state.dllm_assembly = Assembly(state.prompt_len, details)
        state.dllm_assembly.add(records)


def add_traces(state: Any, completion: Any) -> None:
    """Attach what a request asked for to vLLM's ``CompletionOutput``, made from its state."""
    assembly: Assembly | None = getattr(state, "dllm_assembly", None)
    if assembly is None:
        return
    token_ids = list(state.detokenizer.output_token_ids)
    trace = assembly.put_out(token_ids)
    if assembly.details & StepDetails.STEP_MAPS:
        completion.step_maps = trace.step_maps
    if assembly.details & StepDetails.TRACE:
        completion.diffusion_trace = trace
    if assembly.details & StepDetails.REPLAY and completion.finish_reason is not None:
        completion.diffusion_replay = Replay.of(trace, token_ids)
    if state.queue is not None:
        others = getattr(state.queue, "dllm_outputs", {})
        state.queue.dllm_outputs = others | {completion.index: completion}


def add_to_answer(body: bytes, queues: Iterable[Any]) -> bytes:
    """Add to the choices of an HTTP answer, JSON, what its request asked for.

    `queues` has vLLM's ``RequestOutputCollector`` of each of the request's prompts.
    """
    if body in (b"", b"null"):  # what vLLM 0.33 and 0.32 send to a client that has left
        return body
    answer = json.loads(body)
    kept = [getattr(queue, "dllm_outputs", {}) for queue in queues]
    completions = [outputs[index] for outputs in kept for index in sorted(outputs)]
    for choice in answer.get("choices", ()):
        completion = completions[choice["index"]]
        if hasattr(completion, "step_maps"):
            choice["step_maps"] = completion.step_maps
        if hasattr(completion, "diffusion_trace"):
            choice["diffusion_trace"] = completion.diffusion_trace.as_json()
        if hasattr(completion, "diffusion_replay"):
            choice |= vars(completion.diffusion_replay)
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
