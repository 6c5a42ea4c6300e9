"""Records of passes over canvases, and how they travel between vLLM's processes.

A record travels as rows next to those of logprobs, because vLLM keeps these in order under
asynchronous scheduling, preemption and ranks. A row is (id int32, score float32, bits int32).

    row     id                      score                   bits
    header  start of the canvas     steps, as an int32      minus the flags `PassFlags`
    L rows  token on the canvas     logprob of the token    probability of the token, a float32

A position that this pass did not decide has the probability `UNDECIDED`, one that the request gave
(its prompt's tail, pinned positions) has `GIVEN`, and one that the canvas does not have has the
token `ABSENT`. The worker sends the headers of all records of a step and then all positions,
because that takes the fewest operators. The scheduler joins the rows of a record and adds its
clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import numpy as np

UNDECIDED = -1.0
GIVEN = -2.0
ABSENT = -1


class PassFlags(IntFlag):
    """What a pass did with a sound canvas; it is sent as its negated value."""

    KV_PENDING = 1  # the canvas has left, but its keys and values are still to be written
    WAITED = 2  # the decoding algorithm did not run; set for a commit only if others may wait
    COMMITTED = 4  # the pass was the canvas' commit
    LEFT = 8  # the canvas has left, and the next one begins


class Rows(NamedTuple):
    """Rows of records: int32, float32 and int32 ``[rows]``."""

    ids: np.ndarray
    scores: np.ndarray
    bits: np.ndarray

    def part(self, index: slice) -> Rows:
        """The selected rows."""
        return Rows(*(column[index] for column in self))


@dataclass(frozen=True)
class Record:
    """One pass over a canvas.

    Attributes:
        engine_step: how many steps the engine had finished before.
        milliseconds: when the step's result arrived, since the engine started.
        start: absolute position of the canvas' first position, counted from the prompt's beginning.
        step: how many denoise steps the canvas had taken before.
        told: the flags that say what the pass did.
        tokens: int32 ``[width]``, the canvas after the pass.
        logprobs: float32 ``[width]``, the logprobs of the tokens that this pass decided.
        probabilities: float32 ``[width]``, `UNDECIDED` or `GIVEN` where this pass decided nothing.
    """

    engine_step: int
    milliseconds: int
    start: int
    step: int
    told: PassFlags
    tokens: np.ndarray
    logprobs: np.ndarray
    probabilities: np.ndarray

    @property
    def denoised(self) -> bool:
        """Whether the decoding algorithm ran."""
        return not self.told & (PassFlags.COMMITTED | PassFlags.WAITED)


def records(rows: Rows, clocks: list[int], length: int) -> list[Record]:
    """Decode the records in rows that have passed the scheduler.

    Args:
        rows: ``[records * (1 + L)]``.
        clocks: two numbers for each record, `Record.engine_step` and `Record.milliseconds`.
        length: L.

    Raises:
        ValueError: the number of rows does not match the clocks.
    """
    each, count = length + 1, len(clocks) // 2
    if len(rows.ids) != each * count:
        raise ValueError(f"{len(rows.ids)} rows are not {count} records of {each} rows")
    parts = (rows.part(slice(first, first + each)) for first in range(0, each * count, each))
    return [
        _record(part, *clock)
        for part, clock in zip(parts, zip(clocks[::2], clocks[1::2], strict=True), strict=True)
    ]


def _record(rows: Rows, engine_step: int, milliseconds: int) -> Record:
    width = int((rows.ids[1:] != ABSENT).sum())
    body = rows.part(slice(1, 1 + width))
    return Record(
        engine_step=engine_step,
        milliseconds=milliseconds,
        start=int(rows.ids[0]),
        step=int(rows.scores[0].view(np.int32)),
        told=PassFlags(-int(rows.bits[0])),
        tokens=body.ids,
        logprobs=body.scores,
        probabilities=body.bits.view(np.float32),
    )
