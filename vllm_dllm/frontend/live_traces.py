"""The traces of the latest requests, for a page that shows them while they run.

With the page, every request is traced, whether it asks for that or not; nothing of the trace
reaches the answer. New records of a request arrive with its tokens, so a block is known when it
leaves. Only `LiveTraces.news` processes the records: if nobody opens the page, they are just kept.
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
from vllm_dllm.tracing.trace import Block
from vllm_dllm.vllm_seams.channels import Record

MOST_ANSWERS = 64
# Positions times passes, summed over all answers: a record takes 12 bytes for each, and an event
# made from it at most 200.
MOST_POSITIONS = 1 << 20
# The most events and passes in one piece of news, because other requests wait while it is made.
MOST_EVENTS = 5000
NAME_CHARACTERS = 200


@dataclass
class Answer:
    """What is known about one request, or about one of its choices.

    Attributes:
        number: counts the answers of this server, from 1.
        name: the end of its prompt.
        prompt_length: number of prompt tokens.
        tokens: number of tokens that it has put out.
        running: whether it is still running.
        blocks: its blocks, each with the number of its last change.
        changed: the number of the last change of anything but blocks.
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
    """What an answer is made from.

    Attributes:
        answer: the answer.
        request_id: vLLM's id of the request.
        detokenizer: vLLM's detokenizer, which counts tokens.
        assembly: None once the answer has ended or is no longer kept.
        positions: number of positions in all passes that it has records of.
        stale: whether there are records that the answer does not have yet.
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
        now: the number of the last change that this includes; the next call's ``since``.
        more: whether there are later changes, which the next call returns.
        kept: the numbers of all answers that are kept.
        gone: how many answers are no longer kept.
        answers: the answers in which anything but blocks has changed.
        blocks: tuples of the answer, the block's index in it, and the block.
    """

    now: int
    more: bool
    kept: list[int]
    gone: int
    answers: list[Answer]
    blocks: list[tuple[Answer, int, Block]]


class LiveTraces:
    """The latest `MOST_ANSWERS` answers, or fewer if they are long, see `MOST_POSITIONS`.

    Attributes:
        run: differs between servers, so that a page notices when its server was replaced.
    """

    def __init__(self, running: Mapping[str, Any], name_of: Callable[[Any], str]) -> None:
        """Begin with no answers.

        Args:
            running: vLLM's ``RequestState`` of each running request, by id; vLLM keeps it up to
                date.
            name_of: returns the name to show for a request, given its ``RequestState``.
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
            found: the records, in the order of the engine's steps.
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
        """What has changed; `since` is the ``now`` of the previous news, or 0 for everything."""
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
            # A canvas that begins again discards what was recorded after it.
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
    """Extra arguments of an admitted request that is also traced for `LiveTraces`."""
    resolved = ResolvedRequest.given(extra_args)
    assert resolved is not None, "the request was not admitted"
    traced = replace(resolved, asked=int(resolved.asked | Asked.LIVE))
    return {**(extra_args or {}), RESOLVED: traced}


def live_traces_of(output_processor: Any) -> LiveTraces | None:
    """The `LiveTraces` that vLLM's output processor holds if its requests are shown; else None."""
    live: LiveTraces | None = getattr(output_processor, "dllm_live_traces", None)
    return live


def trace_every_request(client: Any) -> LiveTraces | None:
    """Trace the requests of a server from now on.

    Args:
        client: vLLM's ``AsyncLLM``.

    Returns:
        Their traces; None if this package does not serve the model.
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
