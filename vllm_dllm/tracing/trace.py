"""The trace of an answer, which a user gets, made from the records of the request's passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_dllm.settings.resolution import StepDetails
from vllm_dllm.vllm_seams.channels import PassFlags
from vllm_dllm.vllm_seams.channels.records import GIVEN, UNDECIDED, Record

VERSION = 1


@dataclass
class Event:
    """A position was decided, or its token was withdrawn.

    Attributes:
        step: the denoise step of the block, from 1.
        position: the position in the block, from 0.
        token: the token's id; None if the position is open again.
        probability: the confidence that the decoding algorithm had in the token.
        logprob: the value that the request would get as the token's logprob.
    """

    step: int
    position: int
    token: int | None
    probability: float | None
    logprob: float | None


@dataclass
class Pass:
    """A forward pass over a block.

    Attributes:
        kind: "denoise", "commit" or "wait" (for other canvases, or for a constraint).
        step: number of denoise steps of the block so far, including this pass.
        engine_step: the engine's step; it is the same for requests that share a batch.
        milliseconds: when the result arrived, since the engine's first traced request.
        threshold: the threshold of the step, if it follows the load.
    """

    kind: str
    step: int
    engine_step: int
    milliseconds: int
    threshold: float | None = None


@dataclass
class Block:
    """A canvas from its first step on.

    Attributes:
        start: its first position, counted from the beginning of the prompt.
        width: number of its positions.
        given: positions that the request gave: its prompt's last tokens, and pinned ones.
        passes: the passes, in order.
        events: the events, in order.
        tokens: ids on the canvas after the last pass; undecided positions hold what the model
            reads there.
    """

    start: int
    width: int
    given: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after its last one, counted like `start`."""
        return self.start + self.width

    def as_json(self) -> dict[str, Any]:
        """Return what `dataclasses.asdict` does, in a tenth of the time and without its copies."""
        return {
            **vars(self),
            "passes": [vars(each) for each in self.passes],
            "events": [vars(each) for each in self.events],
        }

    def deciding(self) -> dict[int, Event]:
        """The last event of each position that is decided, by position."""
        last = {event.position: event for event in self.events}
        return {position: event for position, event in last.items() if event.token is not None}


@dataclass
class Trace:
    """The steps of an answer. Lists with a value for each output token have the output's length.

    Attributes:
        prompt_length: number of prompt tokens, at which the output begins.
        step_maps: for each token the denoise step of its block that decided it, from 1; 0 for a
            pinned token.
        block_indices: for each token the index of its block in `blocks`.
        probabilities: for each token the `Event.probability` of its decision.
        logprobs: for each token the `Event.logprob` of its decision.
        blocks: all blocks that tokens have left from.
    """

    prompt_length: int
    step_maps: list[int] = field(default_factory=list)
    block_indices: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The trace as plain values."""
        blocks = [block.as_json() for block in self.blocks]
        return {"version": VERSION, **vars(self), "blocks": blocks}


@dataclass(frozen=True)
class Replay:
    """The data to replay a rollout to the end of its last block, which extends past the answer.

    The contract between a trainer and an engine comes from DARE (yjyddq/DARE, cj_trajectory.py).

    Attributes:
        dllm_replay_token_ids: the answer and the rest of the last canvas.
        dllm_replay_step_maps: the deciding step of each, from 1.
        dllm_stop_length: how many of them are the answer.
        dllm_replay_contract_version: of the contract.
    """

    dllm_replay_token_ids: list[int]
    dllm_replay_step_maps: list[int]
    dllm_stop_length: int
    dllm_replay_contract_version: int = 1

    @classmethod
    def of(cls, trace: Trace, token_ids: list[int]) -> Replay:
        """The replay of a finished answer; every position after it must have been decided."""
        ids, steps = list(token_ids), list(trace.step_maps)
        if trace.blocks:
            block = trace.blocks[-1]
            behind = trace.prompt_length + len(ids) - block.start
            deciding = block.deciding()
            for position in range(behind, block.width):
                if position not in deciding:
                    raise ValueError(f"position {position} of the last block was never decided")
                token = deciding[position].token
                assert token is not None
                ids.append(token)
                steps.append(deciding[position].step)
        return cls(ids, steps, len(token_ids))


class TraceError(ValueError):
    """The records contradict the tokens that the request put out."""


@dataclass
class _Canvas:
    """The records of a canvas, and the block made from them, if it is made."""

    start: int
    records: list[Record]
    block: Block | None = None


class Assembly:
    """A request's trace, which grows with its output; `details` is what the request wants."""

    def __init__(self, prompt_length: int, details: StepDetails) -> None:
        self.details = details
        self.trace = Trace(prompt_length)
        self._canvases: list[_Canvas] = []

    def add(self, records: Iterable[Record]) -> None:
        """Take in records, in the order of the engine's steps.

        A canvas that began again, because its request was preempted or a result was dropped, has
        several records of the same step. The later ones count.
        """
        for record in records:
            canvases = self._canvases
            while canvases and canvases[-1].start > record.start:
                canvases.pop()
            if not canvases or canvases[-1].start < record.start:
                canvases.append(_Canvas(record.start, []))
            canvas = canvases[-1]
            if record.denoised:
                canvas.records = [it for it in canvas.records if _steps(it) <= record.step]
            canvas.records.append(record)
            canvas.block = None

    def blocks(self) -> list[Block]:
        """All blocks that have records. A block that has not changed is the same object."""
        blocks = []
        for canvas in self._canvases:
            canvas.block = canvas.block or _block(canvas)
            blocks.append(canvas.block)
        return blocks

    def put_out(self, token_ids: Sequence[int]) -> Trace:
        """The trace of an output, all of it so far; a token without a step is a `TraceError`."""
        trace = self.trace
        trace.blocks = self.blocks()
        index = trace.block_indices[-1] if trace.block_indices else 0
        deciding: dict[int, dict[int, Event]] = {}
        for token in range(len(trace.step_maps), len(token_ids)):
            position = trace.prompt_length + token
            while index < len(trace.blocks) and position >= trace.blocks[index].end:
                index += 1
            if index == len(trace.blocks):
                raise TraceError(f"no pass over output token {token} was recorded")
            block = trace.blocks[index]
            events = deciding.setdefault(index, block.deciding())
            event = events.get(position - block.start)
            if event is None or event.token != token_ids[token]:
                raise TraceError(
                    f"output token {token} is {token_ids[token]}, and its block decided "
                    f"{'nothing' if event is None else event.token} there"
                )
            assert event.probability is not None and event.logprob is not None
            trace.step_maps.append(event.step)
            trace.block_indices.append(index)
            trace.probabilities.append(event.probability)
            trace.logprobs.append(event.logprob)
        return trace


def _steps(record: Record) -> int:
    """The number of denoise steps of the canvas so far, including this pass."""
    return record.step + record.denoised


def _block(canvas: _Canvas) -> Block:
    """The passes and events of a canvas' records."""
    block = Block(canvas.start, len(canvas.records[0].tokens))
    held: np.ndarray = np.full(block.width, -1, np.int64)
    given = canvas.records[0].probabilities == GIVEN
    block.given = np.flatnonzero(given).tolist()
    for position in block.given:
        token = int(canvas.records[0].tokens[position])
        held[position] = token
        block.events.append(Event(0, position, token, 1.0, 0.0))
    for record in canvas.records:
        kind = "wait"
        if record.denoised:
            kind = "denoise"
            block.events += _events(record, held)
        elif record.flags & PassFlags.COMMITTED:
            kind = "commit"
        clock = (record.engine_step, record.milliseconds)
        block.passes.append(Pass(kind, _steps(record), *clock, record.threshold))
        block.tokens = record.tokens.tolist()
    return block


def _events(record: Record, held: np.ndarray) -> list[Event]:
    """The events of a denoise step; `held` has the tokens decided before it and is updated."""
    decided = record.probabilities >= 0
    new = decided & (record.tokens != held)
    withdrawn = (record.probabilities == UNDECIDED) & (held >= 0) & (record.tokens != held)
    arrays, events = (record.tokens, record.probabilities, record.logprobs), []
    for position in np.flatnonzero(new | withdrawn).tolist():
        decision = [each[position].item() for each in arrays] if new[position] else [None] * 3
        events.append(Event(_steps(record), position, *decision))
    held[new] = record.tokens[new]
    held[withdrawn] = -1
    return events
