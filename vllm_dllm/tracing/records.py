"""Records of passes over canvases, and how they travel between vLLM's processes.

A record travels as rows beside those of logprobs, because that is a way which vLLM keeps in order
under asynchronous scheduling, preemption and ranks. A row is (id int32, score float32, bits int32).

    row     id                      score                   bits
    clock   steps of the engine     -                       milliseconds since the engine started
    header  start of the canvas     steps before this one   `Flag`s + FLAGS * index in the batch
    L rows  token on the canvas     logprob of the token    probability of the token, a float32

A position that this pass did not decide has the probability `UNDECIDED`, one that the request gave
(its prompt's tail, pinned positions) has `GIVEN`, and one that the canvas does not have has the
token `ABSENT`. The scheduler adds the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import numpy as np

UNDECIDED = -1.0
GIVEN = -2.0
ABSENT = -1


class Flag(IntFlag):
    """What a pass was to a canvas; one that is nothing of it waited."""

    DENOISED = 1  # the decoding algorithm ran
    COMMITTED = 2  # keys and values of the final canvas were written
    LEFT = 4  # the canvas left, and the next one began


FLAGS = 8


class Rows(NamedTuple):
    """Rows of records: int32, float32 and int32 of the same shape, ``[rows]`` or more of them."""

    ids: np.ndarray
    scores: np.ndarray
    bits: np.ndarray

    def part(self, index: int | slice) -> Rows:
        """What is at an index, or at a slice, of the first dimension."""
        return Rows(*(column[index] for column in self))

    @classmethod
    def join(cls, parts: list[Rows]) -> Rows:
        """All rows of `parts`, in order."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Record:
    """One pass over a canvas.

    Attributes:
        engine_step: how many steps the engine had finished before.
        milliseconds: when the step's result arrived, since the engine started.
        start: absolute position of the canvas' first position, counted from the prompt's beginning.
        step: how many denoise steps the canvas had taken before.
        flags: what the pass was.
        tokens: int32 ``[width]``, the canvas behind the pass.
        logprobs: float32 ``[width]``, those of the tokens that this pass decided.
        probabilities: float32 ``[width]``, `UNDECIDED` or `GIVEN` where this pass decided nothing.
    """

    engine_step: int
    milliseconds: int
    start: int
    step: int
    flags: Flag
    tokens: np.ndarray
    logprobs: np.ndarray
    probabilities: np.ndarray


def clock(engine_step: int, milliseconds: int) -> Rows:
    """The row with which the scheduler begins a record."""
    return Rows(
        np.array([engine_step], np.int32),
        np.zeros(1, np.float32),
        np.array([milliseconds], np.int32),
    )


def batch_indices(rows: Rows) -> np.ndarray:
    """The indices in the batch of records that have no clock yet, ``[records, rows]``: int32."""
    indices: np.ndarray = rows.bits[:, 0] // FLAGS
    return indices


def records(rows: Rows, length: int) -> list[Record]:
    """The records in rows that have passed the scheduler; `length` is L."""
    each = length + 2
    if len(rows.ids) % each:
        raise ValueError(f"{len(rows.ids)} rows are no whole number of records of {each} rows")
    return [
        _record(rows.part(slice(first, first + each))) for first in range(0, len(rows.ids), each)
    ]


def _record(rows: Rows) -> Record:
    width = int((rows.ids[2:] != ABSENT).sum())
    body = rows.part(slice(2, 2 + width))
    return Record(
        engine_step=int(rows.ids[0]),
        milliseconds=int(rows.bits[0]),
        start=int(rows.ids[1]),
        step=int(rows.scores[1]),
        flags=Flag(int(rows.bits[1]) % FLAGS),
        tokens=body.ids,
        logprobs=body.scores,
        probabilities=body.bits.view(np.float32),
    )
