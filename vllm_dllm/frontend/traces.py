"""What a request asked to know of its steps, on its outputs.

    output.outputs[0].step_maps         with ``diffusion_return_step_maps``
    output.outputs[0].diffusion_trace   with ``diffusion_trace``, a `tracing.trace.Trace`
    output.outputs[0].diffusion_replay  with ``diffusion_replay``, a `tracing.trace.Replay`, once
                                        the answer is finished

All of them speak of the whole output so far, also where an output has only what is new. Over HTTP
the same fields are in each choice, those of `Replay` by themselves; a streamed chunk has what is
new in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

from vllm_dllm.settings.request import REQUEST_PREFIX, TRACING_OPTIONS, Asked
from vllm_dllm.tracing.assembly import Assembly
from vllm_dllm.tracing.recorder import is_labelled, taken_off
from vllm_dllm.tracing.records import records
from vllm_dllm.tracing.trace import Replay

if TYPE_CHECKING:
    from vllm_dllm.frontend.live_traces import LiveTraces

STEP_MAPS, TRACE, REPLAY = "step_maps", "diffusion_trace", "diffusion_replay"


def take_records(
    request_states: dict[str, Any], outputs: list[Any], live: LiveTraces | None = None
) -> None:
    """Take the records off outputs of the engine, which are then as vLLM knows them.

    Args:
        request_states: vLLM's ``RequestState`` of each running request, by id.
        outputs: vLLM's ``EngineCoreOutput``.
        live: what gets the records of every request, where the server shows them.
    """
    for output in outputs:
        if not is_labelled(output.new_logprobs):
            continue
        output.new_logprobs, rows, label = taken_off(output.new_logprobs)
        state = request_states.get(output.request_id)
        if state is None:  # it was aborted
            continue
        found = records(rows, label.clocks, label.length)
        # Apart from each other: what the server shows must not come near an answer.
        if live is not None and label.asked & Asked.LIVE:
            live.add(state, found)
        if not label.asked & ~Asked.LIVE:
            continue
        if not hasattr(state, "dllm_assembly"):
            state.dllm_assembly = Assembly(state.prompt_len, label.asked)
        state.dllm_assembly.add(found)


def add_traces(state: Any, completion: Any) -> None:
    """Put what a request asked for on one of its outputs.

    Args:
        state: vLLM's ``RequestState``.
        completion: vLLM's ``CompletionOutput``, made from it.
    """
    assembly: Assembly | None = getattr(state, "dllm_assembly", None)
    if assembly is None:
        return
    token_ids = list(state.detokenizer.output_token_ids)
    trace = assembly.put_out(token_ids)
    if assembly.asked & Asked.STEP_MAPS:
        completion.step_maps = trace.step_maps
    if assembly.asked & Asked.TRACE:
        completion.diffusion_trace = trace
    if assembly.asked & Asked.REPLAY and completion.finish_reason is not None:
        completion.diffusion_replay = Replay.of(trace, token_ids)


def fields_of(completion: Any, first: int = 0) -> dict[str, Any]:
    """What is on an output, as plain values for the choice of an HTTP answer.

    Args:
        completion: vLLM's ``CompletionOutput``.
        first: the first output token that the client does not know of yet.
    """
    fields: dict[str, Any] = {}
    if hasattr(completion, STEP_MAPS):
        fields[STEP_MAPS] = list(getattr(completion, STEP_MAPS)[first:])
    if hasattr(completion, TRACE):
        fields[TRACE] = getattr(completion, TRACE).as_json(first)
    if hasattr(completion, REPLAY):
        fields.update(asdict(getattr(completion, REPLAY)))
    return fields


def is_asked(request: Any) -> bool:
    """Whether an HTTP request asks for anything of this module."""
    extra = getattr(request, "vllm_xargs", None) or {}
    return any(extra.get(REQUEST_PREFIX + name) for name in TRACING_OPTIONS)


def refuse_where_none_returns(request: Any) -> None:
    """Refuse to trace an answer whose endpoint has no place for it.

    Args:
        request: of vLLM's HTTP server.

    Raises:
        VLLMValidationError: names the option.
    """
    extra = getattr(request, "vllm_xargs", None) or {}
    asked = [REQUEST_PREFIX + name for name in TRACING_OPTIONS if extra.get(REQUEST_PREFIX + name)]
    if asked and not hasattr(request, "stream_options"):
        raise VLLMValidationError(
            f"{asked[0]} has no effect at this endpoint, whose answers have no place for it; use "
            "/v1/chat/completions or /v1/completions.",
            parameter=asked[0],
        )


class TracedStream:
    """Puts traces into the chunks of a streamed answer, each with the tokens that it speaks of."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}
        self._known: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def take(self, index: int, completion: Any) -> None:
        """Note a new output of the choice ``index``; its ``token_ids`` are the new ones."""
        self._outputs[index] = completion
        self._tokens[index] = self._tokens.get(index, 0) + len(completion.token_ids)

    def add(self, chunk: str) -> str:
        """The chunk, with what is known of the tokens that it brings.

        Args:
            chunk: a server-sent event.
        """
        head, _, body = chunk.partition("data: ")
        if head or not body.startswith("{"):
            return chunk
        content = json.loads(body)
        changed = False
        for choice in content.get("choices", ()):
            index = choice.get("index")
            if index in self._outputs and _brings_tokens(choice):
                completion = self._outputs.pop(index)
                choice.update(fields_of(completion, self._known.get(index, 0)))
                self._known[index] = self._tokens[index]
                changed = True
        return f"data: {json.dumps(content, ensure_ascii=False)}\n\n" if changed else chunk


def _brings_tokens(choice: dict[str, Any]) -> bool:
    """Whether a streamed choice has tokens, text, a call or an end, and not only a role."""
    delta = {key: value for key, value in choice.get("delta", {}).items() if key != "role"}
    own = ("text", "token_ids", "finish_reason")
    return any(choice.get(name) for name in own) or any(delta.values())
