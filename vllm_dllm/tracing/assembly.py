"""The front end's part of tracing: it turns the records of a request into a `Trace`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dllm.settings.resolution import StepDetails
from vllm_dllm.tracing.trace import Block, Event, Pass, Trace
from vllm_dllm.vllm_seams.channels import PassFlags
from vllm_dllm.vllm_seams.channels.records import GIVEN, UNDECIDED, Record


class TraceError(ValueError):
    """The records contradict the tokens that the request put out."""


@dataclass
class _Canvas:
    """The records of a canvas, and the block made from them; None if it is not made yet."""

    start: int
    records: list[Record]
    block: Block | None = None


class Assembly:
    """A request's trace, which grows with its output.

    Attributes:
        details: what the request wants to know.
        trace: the trace as of the last `put_out`.
    """

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
        for canvas in self._canvases:
            canvas.block = canvas.block or _block(canvas)
        return [canvas.block for canvas in self._canvases if canvas.block is not None]

    def put_out(self, token_ids: Sequence[int]) -> Trace:
        """The trace of an output; `token_ids` is all of it so far.

        Raises:
            TraceError: a token has no deciding step.
        """
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
    for position in np.flatnonzero(given).tolist():
        token = int(canvas.records[0].tokens[position])
        block.given.append(position)
        block.events.append(Event(0, position, token, 1.0, 0.0))
        held[position] = token
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
    step, events = _steps(record), []
    for position in np.flatnonzero(new | withdrawn).tolist():
        if new[position]:
            event = Event(
                step,
                position,
                int(record.tokens[position]),
                float(record.probabilities[position]),
                float(record.logprobs[position]),
            )
        else:
            event = Event(step, position, None, None, None)
        events.append(event)
    held[new] = record.tokens[new]
    held[withdrawn] = -1
    return events
