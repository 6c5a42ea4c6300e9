"""Tables of integers, in which paths read an automaton and the classes of its tokens.

A kernel takes all tables of a batch in one tensor, and for each path a row of `Column`: where its
tables begin in that tensor, and how long they are. So canvases share tables or have their own, and
any mixture of constraints is one launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch


class Column(IntEnum):
    """The numbers of a path's row. A table is given by its place, anything else by its value.

    Of the automaton (S states, the dead one included):

    - DISTANCE ``[S]``, FIRST_EDGE ``[S + 1]``, TARGET and LABEL ``[edges]``, see
      `automaton_tables`; BY_DEGREE ``[S]``, the states, those with most edges first;
    - FIRST_PART ``[LABELS + 1]`` and PART, the bundles of each label; FIRST_MEMBER
      ``[LABELS + 1]`` and MEMBER, its classes; END_LABEL, the label after the end of the text;
    - FIRST_OF_BUNDLE ``[BUNDLES + 1]`` and OF_BUNDLE, the classes of each bundle; BUNDLE_OF_CLASS
      ``[C + 1]``, -1 for a class in none.

    Of the classes (C classes, T chunks), see `TokenClasses`: TOKEN ``[T * CHUNK]``; REAL ``[T]``,
    the entries of a chunk that are no padding; FIRST_CHUNK and END_CHUNK ``[C + 1]``;
    CLASS_OF_TOKEN ``[IDS]``, C for tokens of no class; WIDE, the wide class or -1; END_TOKEN, the
    lowest id that ends a text.

    Of the path: CANVAS, its canvas in the batch; DRAWS, whether it is drawn; SECOND, whether it is
    the second path of its canvas.
    """

    STATES = 0
    DISTANCE = 1
    FIRST_EDGE = 2
    TARGET = 3
    LABEL = 4
    BY_DEGREE = 5
    LABELS = 6
    END_LABEL = 7
    FIRST_PART = 8
    PART = 9
    FIRST_MEMBER = 10
    MEMBER = 11
    BUNDLES = 12
    FIRST_OF_BUNDLE = 13
    OF_BUNDLE = 14
    BUNDLE_OF_CLASS = 15
    CLASSES = 16
    CHUNKS = 17
    TOKEN = 18
    REAL = 19
    FIRST_CHUNK = 20
    END_CHUNK = 21
    CLASS_OF_TOKEN = 22
    IDS = 23
    WIDE = 24
    END_TOKEN = 25
    CANVAS = 26
    DRAWS = 27
    SECOND = 28


COLUMNS = 32


@dataclass(frozen=True, eq=False)
class Tables:
    """Some tables in one tensor.

    Attributes:
        numbers: int32 ``[N]``.
        columns: int64 ``[COLUMNS]`` on the host, 0 for what is not in these tables.
        is_place: bool ``[COLUMNS]``, the columns that are places in `numbers`.
    """

    numbers: torch.Tensor
    columns: np.ndarray
    is_place: np.ndarray

    @classmethod
    def of(cls, tables: Mapping[Column, np.ndarray], values: Mapping[Column, int]) -> Tables:
        """Join tables (integers of at most 32 bits) and values, on the host."""
        columns: np.ndarray = np.zeros(COLUMNS, dtype=np.int64)
        is_place: np.ndarray = np.zeros(COLUMNS, dtype=bool)
        place = 0
        for column, table in tables.items():
            columns[column], is_place[column] = place, True
            place += table.size
        for column, value in values.items():
            columns[column] = value
        joined = np.concatenate([table.ravel().astype(np.int32) for table in tables.values()])
        return cls(torch.from_numpy(joined), columns, is_place)

    def on(self, device: torch.device) -> Tables:
        """The same tables on a device."""
        return replace(self, numbers=to_device(self.numbers, device))

    def __getitem__(self, column: Column) -> int:
        """A value, or the place of a table."""
        return int(self.columns[column])

    def table(self, column: Column, size: int) -> torch.Tensor:
        """The first numbers of a table, int32 ``[size]``."""
        return self.numbers[self[column] : self[column] + size]


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host without waiting for the device; no copy on a CPU."""
    if device.type in ("cpu", "meta"):
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
