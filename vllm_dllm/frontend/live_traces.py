"""The traces of the latest requests, for a page that shows them while they run.

Every request is traced then, whether it asks for that or not, and nothing of it reaches the answer.
What is new of a request comes with tokens of it, so that a block is known when it leaves. Only
`LiveTraces.news` makes something of the records: where nobody looks, they are just kept.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_dllm.frontend import front_end_of
from vllm_dllm.settings.request import Asked
from vllm_dllm.settings.resolved import RESOLVED, ResolvedRequest
from vllm_dllm.tracing.assembly import Assembly
from vllm_dllm.tracing.records import Record
from vllm_dllm.tracing.trace import Block

MOST_ANSWERS = 64
# Positions times passes of all answers together: a record has 12 bytes for each, and an event that
# is made of it at most 200.
MOST_POSITIONS = 1 << 20
# Events and passes in one piece of news, which is made while other requests wait.
MOST_EVENTS = 5000
NAME_CHARACTERS = 200


@dataclass
class Answer:
    """What is known of one request, or of one of its choices.

    Attributes:
        number: counts the answers of this server, from 1.
        name: the end of its prompt.
        prompt_length: number of prompt tokens.
        tokens: how many tokens it has put out.
        running: whether it goes on.
        blocks: each with the number of the change that made it what it is.
        changed: the number of the change that made the rest what it is.
    """

    number: int
    name: str
    prompt_length: int
    tokens: int = 0
    running: bool = True
    blocks: list[tuple[Block, int]] = field(default_factory=list)
    changed: int = 0


@dataclass
class _Source:
    """What an answer is made of.

    Attributes:
        answer: what is made of it.
        request_id: vLLM's own.
        detokenizer: vLLM's, which counts tokens.
        assembly: None once the answer has ended, or is not kept any more.
        positions: of the passes that it has records of.
        stale: there are records that the answer does not have yet.
    """

    answer: Answer
    request_id: str
    detokenizer: Any
    assembly: Assembly | None
    positions: int = 0
    stale: bool = True


@dataclass(frozen=True)
class News:
    """What has changed since an earlier call.

    Attributes:
        now: the number of the last change that this has; the next call's ``since``.
        more: there are changes behind it, which the next call gives.
        kept: the numbers of all answers that are kept.
        gone: how many answers are not kept any more.
        answers: those of which anything but blocks has changed.
        blocks: answer, index of the block in it, and the block.
    """

    now: int
    more: bool
    kept: list[int]
    gone: int
    answers: list[Answer]
    blocks: list[tuple[Answer, int, Block]]


class LiveTraces:
    """The latest `MOST_ANSWERS` answers, or fewer where they are long, see `MOST_POSITIONS`.

    Attributes:
        run: differs between servers, so that a page notices that its server is another one.
    """

    def __init__(self, running: Mapping[str, Any], name_of: Callable[[Any], str]) -> None:
        """Begin with no answers.

        Args:
            running: vLLM's ``RequestState`` of each running request, by id; it is kept up by vLLM.
            name_of: returns what to call a request, of its ``RequestState``.
        """
        self.run = secrets.token_hex(8)
        self._running = running
        self._name_of = name_of
        self._sources: OrderedDict[int, _Source] = OrderedDict()
        self._begun = self._changes = self._positions = 0

    def add(self, state: Any, found: Iterable[Record]) -> None:
        """Take in records of a request.

        Args:
            state: vLLM's ``RequestState``.
            found: in the order of the engine's steps.
        """
        if not hasattr(state, "dllm_live"):
            state.dllm_live = self._begin(state)
        source: _Source = state.dllm_live
        if source.assembly is None:
            return
        found = list(found)
        source.assembly.add(found)
        source.stale = True
        more = sum(len(record.tokens) for record in found)
        source.positions += more
        self._positions += more
        while len(self._sources) > MOST_ANSWERS or self._positions > MOST_POSITIONS:
            self._forget_the_oldest()

    def news(self, since: int) -> News:
        """What has changed; `since` is the ``now`` of the news before, 0 for everything."""
        self._refresh()
        kept = {number: source.answer for number, source in self._sources.items()}
        changed = sorted(
            (change, number, index)
            for number, answer in kept.items()
            for index, (_, change) in enumerate(answer.blocks)
            if change > since
        )
        blocks: list[tuple[Answer, int, Block]] = []
        size, now = 0, self._changes
        for change, number, index in changed:
            block, _ = kept[number].blocks[index]
            size += len(block.events) + len(block.passes)
            if blocks and size > MOST_EVENTS:
                break
            blocks.append((kept[number], index, block))
            now = change
        more = len(blocks) < len(changed)
        return News(
            now=now if more else self._changes,
            more=more,
            kept=list(kept),
            gone=self._begun - len(kept),
            answers=[answer for answer in kept.values() if answer.changed > since],
            blocks=blocks,
        )

    def _begin(self, state: Any) -> _Source:
        self._begun += 1
        answer = Answer(self._begun, self._name_of(state), state.prompt_len)
        assembly = Assembly(state.prompt_len, Asked.LIVE)
        source = _Source(answer, state.request_id, state.detokenizer, assembly)
        self._sources[answer.number] = source
        return source

    def _forget_the_oldest(self) -> None:
        _, source = self._sources.popitem(last=False)
        self._positions -= source.positions
        source.assembly = None

    def _refresh(self) -> None:
        for source in self._sources.values():
            running = source.request_id in self._running
            if source.assembly is None or (running and not source.stale):
                continue
            answer, blocks = source.answer, source.assembly.blocks()
            for index, block in enumerate(blocks):
                if index == len(answer.blocks):
                    answer.blocks.append((block, self._next_change()))
                elif answer.blocks[index][0] is not block:
                    answer.blocks[index] = (block, self._next_change())
            # A canvas that begins again takes what was recorded behind it away.
            del answer.blocks[len(blocks) :]
            answer.tokens = source.detokenizer.num_output_tokens()
            answer.running, source.stale = running, False
            answer.changed = self._next_change()
            if not running:
                source.assembly = None

    def _next_change(self) -> int:
        self._changes += 1
        return self._changes


def asked_live(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Extra arguments of an admitted request that is traced for `LiveTraces`, too."""
    resolved = ResolvedRequest.given(extra_args)
    assert resolved is not None, "the request was not admitted"
    traced = replace(resolved, asked=int(resolved.asked | Asked.LIVE))
    return {**(extra_args or {}), RESOLVED: traced}


def live_traces_of(output_processor: Any) -> LiveTraces | None:
    """What vLLM's output processor holds where its requests are shown; else None."""
    live: LiveTraces | None = getattr(output_processor, "dllm_live_traces", None)
    return live


def trace_every_request(client: Any) -> LiveTraces | None:
    """Trace the requests of a server from now on.

    Args:
        client: vLLM's ``AsyncLLM``.

    Returns:
        Their traces; None where the model is not one of this package's.
    """
    front_end = front_end_of(client.input_processor)
    if front_end is None:
        return None
    tokenizer = client.input_processor.tokenizer

    def name_of(state: Any) -> str:
        text = state.prompt
        if text is None and tokenizer is not None and state.prompt_token_ids:
            text = tokenizer.decode(state.prompt_token_ids[-NAME_CHARACTERS:])
        if text is None:
            text = f"{state.prompt_len} tokens"
        cut = len(text) > NAME_CHARACTERS
        name = ("\u2026" if cut else "") + text[-NAME_CHARACTERS:]
        return name if state.parent_req is None else f"{name} (choice {state.request_index})"

    live = LiveTraces(client.output_processor.request_states, name_of)
    client.output_processor.dllm_live_traces = live
    front_end.traces_all = True
    return live
