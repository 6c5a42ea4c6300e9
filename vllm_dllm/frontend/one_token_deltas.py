"""Hand vLLM's parsers of reasoning and tool calls one token at a time.

vLLM's parsers were written for answers that grow by one token. Several of them go wrong if a delta
has more, as those of a block-diffusion model have: they leak a marker into the text, lose a call,
or raise. `one_token_at_a_time` makes a parser class take a delta of k tokens as k deltas of one,
and joins what comes out, so a stream is parsed as that of an autoregressive model is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer


def one_token_at_a_time(parser: type[Parser]) -> type[Parser]:
    """A subclass of vLLM's class that parses like `parser`, one token at a time."""
    return type(f"OneToken{parser.__name__}", (_OneTokenDeltas, parser), {})


def joined(parts: Sequence[DeltaMessage]) -> DeltaMessage | None:
    """Merge the messages of one delta's tokens into one: each text and each call added up.

    A message has no order between its texts and its calls: what is text between two calls of one
    delta comes before both. Where a thought follows a call, which only the parser `inkling` gives,
    `/v1/messages` ends a call that began in an earlier delta too early.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    calls: dict[int, DeltaToolCall] = {}
    for call in (call for part in parts for call in part.tool_calls):
        before = calls.get(call.index)
        calls[call.index] = call if before is None else _joined_call(before, call)
    whole: dict[str, Any] = {
        "content": _joined_text(part.content for part in parts),
        "reasoning": _joined_text(part.reasoning for part in parts),
        "tool_calls": list(calls.values()) or None,
    }
    return DeltaMessage(**{name: value for name, value in whole.items() if value is not None})


def _joined_call(first: DeltaToolCall, second: DeltaToolCall) -> DeltaToolCall:
    functions = [call.function for call in (first, second) if call.function is not None]
    return DeltaToolCall(
        index=first.index,
        id=first.id or second.id,
        type=first.type or second.type,
        function=DeltaFunctionCall(
            name=_joined_text(function.name for function in functions),
            arguments=_joined_text(function.arguments for function in functions),
        ),
    )


def _joined_text(pieces: Iterable[str | None]) -> str | None:
    given = [piece for piece in pieces if piece is not None]
    return "".join(given) if given else None


def split_open_call_first(
    original: Callable[[DeltaMessage], list[DeltaMessage]], delta: DeltaMessage
) -> list[DeltaMessage]:
    """Split a message into the events of the Responses API, which vLLM orders as text, then calls.

    The arguments of a call that began in an earlier message must come first, because the API ends a
    call where text follows.
    """
    calls = delta.tool_calls
    named = {call.index for call in calls if call.function and call.function.name is not None}
    going_on = [call for call in calls if call.index not in named]
    if not going_on:
        return original(delta)
    rest = delta.model_copy(update={"tool_calls": [c for c in calls if c not in going_on]})
    return [*original(DeltaMessage(tool_calls=going_on)), *original(rest)]


class _OneTokenDeltas(Parser):
    """The first base of the classes of `one_token_at_a_time`."""

    _texts: _TokenTexts | None = None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """See vLLM's class; the result is that of all tokens of the delta."""
        if self._texts is None:
            self._texts = _TokenTexts(self.model_tokenizer, prompt_token_ids, request)
        pieces = list(self._texts.split(delta_text, delta_token_ids, finished))
        if finished and not pieces:
            pieces = [(delta_text, [])]
        parts = []
        for number, (text, ids) in enumerate(pieces, start=1):
            part = super().parse_delta(  # type: ignore[safe-super]
                text, ids, request, prompt_token_ids, finished=finished and number == len(pieces)
            )
            if part is not None:
                parts.append(part)
        return joined(parts)


class _TokenTexts:
    """Finds the text of each token in the text of an answer, as vLLM's detokenizer made it.

    The text of a token may arrive later than its id, because vLLM holds back what may be the
    beginning of a stop string. Such a token waits for its text.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int] | None, request: Any) -> None:
        params = SamplingParams(
            # Since vLLM 0.33, None leaves it to the server, which hides them by default.
            skip_special_tokens=request.skip_special_tokens is not False,
            spaces_between_special_tokens=getattr(request, "spaces_between_special_tokens", True),
        )
        detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer,
            SimpleNamespace(  # type: ignore[arg-type]
                request_id="",
                prompt_token_ids=prompt_token_ids or [],
                prompt_embeds=None,
                sampling_params=params,
            ),
        )
        assert isinstance(detokenizer, BaseIncrementalDetokenizer)
        self._tokenizer, self._detokenizer = tokenizer, detokenizer
        # The tokens that wait, each with the length of its text, and the text that has arrived.
        self._waiting: deque[tuple[int, int]] = deque()
        self._text = ""

    def split(self, text: str, ids: list[int], finished: bool) -> Iterator[tuple[str, list[int]]]:
        """Take in what arrives; yield text and id of each token whose text is complete.

        With `finished` nothing follows, and all tokens are yielded; those that the answer's text
        does not show (an end token, what follows a stop string) have an empty text.
        """
        self._text += text
        for token in ids:
            self._detokenizer.token_ids.append(token)
            self._waiting.append((token, len(self._detokenizer.decode_next(token))))
        while self._waiting and (finished or self._waiting[0][1] <= len(self._text)):
            token, length = self._waiting.popleft()
            if not length:
                # vLLM's derenderer shows a special token although the request hides it. A head may
                # have more rows than the tokenizer has tokens; such an id has no name.
                [name] = self._tokenizer.convert_ids_to_tokens([token])
                length = len(name) if name and self._text.startswith(name) else 0
            if finished and not self._waiting:
                length = len(self._text)
            own, self._text = self._text[:length], self._text[length:]
            yield own, [token]
