"""Tables of integers, in which paths read an automaton and the classes of its tokens.

A kernel takes all tables of a batch in one tensor, and for each path a row of `Column`: where its
tables begin in that tensor, and how long they are. So canvases share tables or have their own, and
any mixture of constraints is one launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from canvas_grammar.automaton.pushdown import NO_CLASS
from canvas_grammar.automaton.windows import TokenAutomaton

if TYPE_CHECKING:
    import torch


class Column(IntEnum):
    """The numbers of a path's row. A table is given by its place, anything else by its value.

    Of the automaton (S states, the dead one included):

    - DISTANCE ``[S]``, FIRST_EDGE ``[S + 1]``, TARGET and LABEL ``[edges]``;
      BY_DEGREE ``[S]``, the states, those with most edges first;
    - FIRST_PART ``[LABELS + 1]`` and PART, the bundles of each label; FIRST_MEMBER
      ``[LABELS + 1]`` and MEMBER, its classes; END_LABEL, the label after the end of the text;
    - FIRST_OF_BUNDLE ``[BUNDLES + 1]`` and OF_BUNDLE, the classes of each bundle; BUNDLE_OF_CLASS
      ``[C + 1]``, -1 for a class in none.

    Of the classes (C classes, T chunks), see `class_tables`: TOKEN ``[T * CHUNK]``; REAL ``[T]``,
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
    """Some tables in one tensor."""

    numbers: Any  # int32 ``[N]``, an array, or on a device a tensor
    columns: np.ndarray  # int64 ``[COLUMNS]`` on the host, 0 for what is not in these tables
    is_place: np.ndarray  # bool ``[COLUMNS]``, the columns that are places in `numbers`

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
        return cls(joined, columns, is_place)

    def on(self, device: torch.device) -> Tables:
        """The same tables on a device."""
        import torch

        return replace(self, numbers=to_device(torch.as_tensor(self.numbers), device))

    def __getitem__(self, column: Column) -> int:
        """A value, or the place of a table."""
        return int(self.columns[column])

    def table(self, column: Column, size: int) -> Any:
        """The first numbers of a table, int32 ``[size]``."""
        return self.numbers[self[column] : self[column] + size]


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host without waiting for the device; no copy on a CPU."""
    if device.type in ("cpu", "meta"):
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


CHUNK = 64


def class_tables(class_of_token: np.ndarray, classes: int) -> Tables:
    """Lay out the tokens of each class of a constraint in chunks of equal size, on the host.

    A reduction over each chunk does most of the work, and a small one then combines the chunks of
    each class. Tokens ascend within a class. Its last chunk is padded with copies of its last
    token. Tokens of no class are laid out after all others, and do not count as CHUNKS.

    A *wide* class holds most of the vocabulary; usually it is that of ordinary text in a string.
    If the token that would be chosen without a constraint is in it, the class' weight follows from
    that of the whole row and those of all other tokens, so a CPU need not read it.

    Args:
        class_of_token: int ``[ids]``, the class of each token, or `NO_CLASS`.
        classes: C. The last class is the one that ends a text.
    """
    kind_of = np.where(class_of_token == NO_CLASS, classes, class_of_token).astype(np.int64)
    size = np.bincount(kind_of, minlength=classes + 1)
    wide = int(size.argmax())
    if wide == classes or 2 * size[wide] <= size.sum():
        wide = -1
    count = -(-size // CHUNK)
    first = count.cumsum() - count
    chunk_class = np.arange(classes + 1).repeat(count)
    within = np.arange(len(chunk_class)) - first[chunk_class]
    index = within[:, None] * CHUNK + np.arange(CHUNK)
    last = size[chunk_class][:, None] - 1
    first_place = (size.cumsum() - size)[chunk_class][:, None]
    by_class = np.argsort(kind_of, kind="stable")
    return Tables.of(
        {
            Column.TOKEN: by_class[first_place + np.minimum(index, last)],
            Column.REAL: (index <= last).sum(1),
            Column.FIRST_CHUNK: first,
            Column.END_CHUNK: first + count,
            Column.CLASS_OF_TOKEN: kind_of,
        },
        {
            Column.CLASSES: classes,
            Column.CHUNKS: int(first[classes]),
            Column.IDS: len(kind_of),
            Column.WIDE: wide,
            Column.END_TOKEN: int((kind_of == classes - 1).argmax()),
        },
    )


@dataclass(frozen=True)
class LabelBundles:
    """Classes that every label of an automaton has all of or none of; int64 arrays.

    Labels are large sets of classes, and most of them differ in few. So the weights of classes are
    first joined to those of bundles, and these to those of labels.
    """

    classes: np.ndarray  # those of all bundles, one bundle after the other, each ascending
    bundle_size: np.ndarray  # ``[bundles]``
    parts: np.ndarray  # the bundles of all labels, one label after the other
    label_size: np.ndarray  # ``[labels]``

    @classmethod
    def from_labels(cls, members: np.ndarray, size: np.ndarray, classes: int) -> LabelBundles:
        """Make bundles of the members of all labels, one label after the other, each ascending."""
        label = np.arange(len(size)).repeat(size)
        # The labels of every class, ascending. Classes are at most 16-bit numbers.
        by_class = label[np.argsort(members.astype(np.uint16), kind="stable")]
        count = np.bincount(members, minlength=classes)
        used = np.flatnonzero(count)
        bundle, first = _equal_parts(by_class, count[used])
        bundle_of: np.ndarray = np.zeros(classes, dtype=np.int64)
        bundle_of[used] = bundle
        # Each bundle is counted once in a label: with its first class.
        is_first: np.ndarray = np.zeros(classes, dtype=bool)
        is_first[used[first]] = True
        counts = is_first[members]
        return cls(
            classes=used[np.argsort(bundle, kind="stable")],
            bundle_size=np.bincount(bundle, minlength=len(first)),
            parts=bundle_of[members[counts]],
            label_size=np.bincount(label[counts], minlength=len(size)),
        )


def _equal_parts(values: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The groups of equal adjacent parts of an array, and the first part of each group."""
    weights = np.random.default_rng(0).integers(1, 1 << 62, size=int(values.max()) + 1)
    first = size.cumsum() - size
    keys = np.add.reduceat(weights[values], first)  # wraps around
    _, one, group = np.unique(keys, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    # Compare each part with the first one of its group, in case two sums are equal by chance.
    model = one[group]
    place = np.arange(len(values)) - first.repeat(size)
    same = bool((size == size[model]).all()) and bool(
        (values == values[first[model].repeat(size) + place]).all()
    )
    if same:
        return group, one
    return np.arange(len(size)), np.arange(len(size))


# The distance of the dead state. Budgets are smaller.
UNREACHABLE = 1 << 30


def automaton_tables(automaton: TokenAutomaton) -> Tables:
    """Make the tables of an automaton, on the host.

    States keep their numbers; after them comes the dead state, which has no edges and from which
    the end of the text is UNREACHABLE. Edges are ordered by source, then by the lowest class of
    their label. No two edges of a state have a class in common, so this order, by which ties go and
    noise is numbered, does not depend on how states are numbered. Bundles and labels are ordered by
    size, so that a kernel that takes some of them at a time has equal work for each. The end
    state's only edge has a label of its own, because it weighs more than its class.
    """
    members: np.ndarray = automaton.members.astype(np.int64)
    size: np.ndarray = np.diff(automaton.label_first).astype(np.int64)
    lowest = members[automaton.label_first[:-1]]
    order = np.lexsort((lowest[automaton.edge_label], automaton.edge_source))
    source: np.ndarray = automaton.edge_source[order].astype(np.int64)
    label: np.ndarray = automaton.edge_label[order].astype(np.int64)
    label[source == automaton.states - 1] = len(size)
    members, size = np.append(members, automaton.classes - 1), np.append(size, 1)
    bundles = LabelBundles.from_labels(members, size, automaton.classes)
    states = automaton.states + 1

    # From the new number of a bundle or label to the old one, and back.
    bundle_order = np.argsort(bundles.bundle_size, kind="stable")
    label_order = np.argsort(bundles.label_size, kind="stable")
    new_bundle, new_label = np.argsort(bundle_order), np.argsort(label_order)
    of_bundle, first_of_bundle = _reordered(bundles.classes, bundles.bundle_size, bundle_order)
    part, first_part = _reordered(new_bundle[bundles.parts], bundles.label_size, label_order)
    member, first_member = _reordered(members, size, label_order)
    bundle_of_class: np.ndarray = np.full(automaton.classes + 1, -1, dtype=np.int64)
    bundle_of_class[of_bundle] = np.arange(len(bundle_order)).repeat(np.diff(first_of_bundle))
    count = np.bincount(source, minlength=states)
    return Tables.of(
        {
            Column.DISTANCE: np.append(automaton.distance, UNREACHABLE),
            Column.FIRST_EDGE: np.append(0, count.cumsum()),
            Column.TARGET: automaton.edge_target[order],
            Column.LABEL: new_label[label],
            Column.BY_DEGREE: np.argsort(-count, kind="stable"),
            Column.FIRST_PART: first_part,
            Column.PART: part,
            Column.FIRST_MEMBER: first_member,
            Column.MEMBER: member,
            Column.FIRST_OF_BUNDLE: first_of_bundle,
            Column.OF_BUNDLE: of_bundle,
            Column.BUNDLE_OF_CLASS: bundle_of_class,
        },
        {
            Column.STATES: states,
            Column.LABELS: len(size),
            Column.END_LABEL: int(new_label[-1]),
            Column.BUNDLES: len(bundle_order),
        },
    )


def dead_state(tables: Tables) -> int:
    """The number of the automaton's dead state."""
    return tables[Column.STATES] - 1


def _reordered(
    values: np.ndarray, size: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Adjacent parts of an array in another order, and where each part begins (one more)."""
    first, new = (size.cumsum() - size)[order], size[order]
    begins: np.ndarray = np.append(0, new.cumsum())
    index = np.arange(len(values)) + (first - begins[:-1]).repeat(new)
    return values[index], begins
