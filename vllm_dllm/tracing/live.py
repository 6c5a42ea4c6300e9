"""The traces of the latest requests, for a page that shows them while they run.

With the page, every request is traced, whether it asks for that or not; nothing of the trace
reaches the answer. New records of a request arrive with its tokens, so a block is known when it
leaves. Only `LiveTraces.news` processes the records: if nobody opens the page, they are just kept.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_dllm.settings.resolution import StepDetails
from vllm_dllm.tracing.trace import Assembly, Block
from vllm_dllm.vllm_seams.channels.records import Record

MOST_ANSWERS = 64
# Positions times passes, summed over all answers: a record takes 12 bytes for each, and an event
# made from it at most 200.
MOST_POSITIONS = 1 << 20
# The most events and passes in one piece of news, because other requests wait while it is made.
MOST_EVENTS = 5000


@dataclass
class _Answer:
    """The state of one request, or of one of its choices."""

    number: int  # counts the answers of this server, from 1
    name: str  # what the page calls it
    state: Any  # vLLM's ``RequestState``
    assembly: Assembly | None  # None once the answer has ended or is no longer kept
    positions: int = 0  # in all passes that it has records of
    stale: bool = True  # whether there are records that `blocks` does not have yet
    running: bool = True
    # Each with the number of its last change, and the number of the last change of anything else.
    blocks: list[tuple[Block, int]] = field(default_factory=list)
    changed: int = 0

    def as_json(self) -> dict[str, Any]:
        """All but the blocks, as plain values."""
        return {
            "number": self.number,
            "name": self.name,
            "prompt_length": self.state.prompt_len,
            "tokens": self.state.detokenizer.num_output_tokens(),
            "running": self.running,
            "blocks": len(self.blocks),
        }


class LiveTraces:
    """The latest `MOST_ANSWERS` answers, or fewer if they are long, see `MOST_POSITIONS`."""

    def __init__(self, running: Mapping[str, Any], name_of: Callable[[Any], str]) -> None:
        """Begin with no answers.

        `running` is vLLM's own table of each running request's ``RequestState``, from which
        `name_of` makes a name to show.
        """
        # Differs between servers, so that a page notices when its server was replaced.
        self.run = secrets.token_hex(8)
        self._running, self._name_of = running, name_of
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        self._begun = self._changes = self._positions = 0

    def add(self, state: Any, records: Iterable[Record]) -> None:
        """Take in records of a request (a ``RequestState``), in the order of the engine's steps."""
        if not hasattr(state, "dllm_live"):
            self._begun += 1
            assembly = Assembly(state.prompt_len, StepDetails.LIVE)
            state.dllm_live = _Answer(self._begun, self._name_of(state), state, assembly)
            self._answers[self._begun] = state.dllm_live
        answer: _Answer = state.dllm_live
        if answer.assembly is None:
            return
        records = list(records)
        answer.assembly.add(records)
        answer.stale = True
        more = sum(len(record.tokens) for record in records)
        answer.positions += more
        self._positions += more
        while len(self._answers) > MOST_ANSWERS or self._positions > MOST_POSITIONS:
            _, oldest = self._answers.popitem(last=False)
            self._positions -= oldest.positions
            oldest.assembly = None

    def news(self, since: int) -> dict[str, Any]:
        """The changes since an earlier call whose ``now`` is `since` (0 for all), as plain values.

        They are ``run``; ``now``, the number of the last change that is included; ``more``, whether
        there are later changes, for the next call; ``kept``, the numbers of all answers that are
        kept; ``gone``, how many others there were; ``answers``, those in which anything but blocks
        has changed; ``blocks``, each with its answer's number and its index in it.
        """
        self._refresh()
        changed = sorted(
            (change, answer.number, index, block)
            for answer in self._answers.values()
            for index, (block, change) in enumerate(answer.blocks)
            if change > since
        )
        blocks: list[dict[str, Any]] = []
        size, now = 0, self._changes
        for change, number, index, block in changed:
            size += len(block.events) + len(block.passes)
            if blocks and size > MOST_EVENTS:
                break
            blocks.append({"answer": number, "index": index, "block": block.as_json()})
            now = change
        more = len(blocks) < len(changed)
        return {
            "run": self.run,
            "now": now if more else self._changes,
            "more": more,
            "kept": list(self._answers),
            "gone": self._begun - len(self._answers),
            "answers": [it.as_json() for it in self._answers.values() if it.changed > since],
            "blocks": blocks,
        }

    def _refresh(self) -> None:
        for answer in self._answers.values():
            running = answer.state.request_id in self._running
            if answer.assembly is None or (running and not answer.stale):
                continue
            blocks = answer.assembly.blocks()
            for index, block in enumerate(blocks):
                if index == len(answer.blocks):
                    answer.blocks.append((block, self._next_change()))
                elif answer.blocks[index][0] is not block:
                    answer.blocks[index] = (block, self._next_change())
            # A canvas that begins again discards what was recorded after it.
            del answer.blocks[len(blocks) :]
            answer.running, answer.stale = running, False
            answer.changed = self._next_change()
            if not running:
                answer.assembly = None

    def _next_change(self) -> int:
        self._changes += 1
        return self._changes
