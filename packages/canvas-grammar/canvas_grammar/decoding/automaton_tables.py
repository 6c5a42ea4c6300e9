"""The tables in which paths read one automaton.

States keep their numbers; after them comes the dead state, which has no edges. Edges are ordered
by source, then by the lowest class of their label. No two edges of a state have a class in common,
so this order, by which ties go and noise is numbered, does not depend on how states are numbered.
Bundles and labels are ordered by their sizes, so that a kernel that takes some of them at a time
has equal work for each.
"""

from __future__ import annotations

import numpy as np

from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.label_bundles import LabelBundles
from canvas_grammar.decoding.tables import Column, Tables

# The distance of the dead state. Budgets are smaller.
UNREACHABLE = 1 << 30


def automaton_tables(automaton: TokenAutomaton) -> Tables:
    """Make the tables, on the host.

    The tokens to the end of the text are UNREACHABLE from the dead state. The end state's only edge
    has a label of its own, because it weighs more than its class, see `best_path`.
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
