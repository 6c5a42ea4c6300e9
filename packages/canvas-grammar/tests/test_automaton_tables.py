"""What the tables of an automaton say, and what a CPU leaves out: neither changes a path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from canvas_grammar.automaton.configurations import START
from canvas_grammar.automaton.windows import Window, window
from canvas_grammar.decoding.automaton_tables import UNREACHABLE, automaton_tables, dead_state
from canvas_grammar.decoding.label_bundles import LabelBundles
from canvas_grammar.decoding.tables import Column
from canvas_grammar_support.helpers import automaton, together
from canvas_grammar_support.helpers import window as canvas
from canvas_grammar_support.joined import best, drawn, joined
from canvas_grammar_support.noise import row_keys
from test_configurations import ALL
from test_configurations import compiled as configurations_of

LENGTH = 8


def walk(part: Window, steps: int, rng: np.random.Generator) -> int:
    """A state that some tokens lead to from the first one."""
    state = 0
    for _ in range(steps):
        targets = part.automaton.edge_target[part.automaton.edge_source == state]
        state = int(rng.choice(targets)) if len(targets) else state
    return state


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "cpu") for name in ALL),
        *(pytest.param(name, "triton", marks=pytest.mark.long) for name in ALL),
    ],
)
def test_the_paths_of_larger_automata(name: str, form: str) -> None:
    """They are the reference's, wherever in a text a canvas begins."""
    part = window(configurations_of(ALL[name], depth=8), START, LENGTH, 12)
    found, rng = part.automaton, np.random.default_rng(1)
    tails = [0, 1, 3, LENGTH]
    windows = together([
        canvas(LENGTH, 90, state=walk(part, tail, rng), first=tail) for tail in tails
    ])  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(tails), LENGTH, found.classes + 1, generator=generator)
    keys = row_keys(torch.arange(len(tails))[:, None], torch.arange(LENGTH))
    constraint = joined(*[found] * len(tails))
    for one, two in (
        [best(constraint, weights, windows, form=form) for form in (form, "reference")],
        [drawn(constraint, weights, windows, keys, form=form) for form in (form, "reference")],
    ):
        assert one.feasible.tolist() == two.feasible.tolist()
        sound = one.feasible
        assert sound[0]
        for attribute in ("classes", "states", "after_end"):
            assert torch.equal(getattr(one, attribute)[sound], getattr(two, attribute)[sound])
        torch.testing.assert_close(one.weight[sound], two.weight[sound], rtol=0, atol=1e-9)


@pytest.mark.parametrize("pattern", ["[abc]{2}(1|2)", "(a|b)*abc?", "[a-c]{2,5}|1*2"])
def test_tables_hold_the_automaton(pattern: str) -> None:
    """Each edge once, with the classes of its label; the dead state has none."""
    found = automaton("regex", pattern)
    tables, dead = automaton_tables(found), found.states
    assert dead_state(tables) == dead and tables[Column.STATES] == dead + 1
    distance = tables.table(Column.DISTANCE, dead + 1).tolist()
    assert distance == [*found.distance.tolist(), UNREACHABLE]
    first = tables.table(Column.FIRST_EDGE, dead + 2).tolist()
    edges = tables.table(Column.TARGET, first[-1]), tables.table(Column.LABEL, first[-1])
    members = tables.table(Column.FIRST_MEMBER, tables[Column.LABELS] + 1)
    whole = tables.numbers[tables[Column.MEMBER] :]
    seen = set()
    for state in range(dead + 1):
        own = range(first[state], first[state + 1])
        labels = [whole[slice(*members[int(edges[1][e]) :][:2].tolist())].tolist() for e in own]
        assert [min(label) for label in labels] == sorted(min(label) for label in labels)
        seen |= {
            (state, int(edges[0][e]), tuple(label)) for e, label in zip(own, labels, strict=True)
        }
    sets = np.split(found.members, found.label_first[1:-1])
    expected = zip(found.edge_source, found.edge_target, found.edge_label, strict=True)
    assert seen == {(int(s), int(t), tuple(sets[label].tolist())) for s, t, label in expected}
    order = tables.table(Column.BY_DEGREE, dead + 1)
    degrees = np.diff(first)[order.numpy()]
    assert sorted(order.tolist()) == list(range(dead + 1))
    assert (np.diff(degrees) <= 0).all()


@pytest.mark.parametrize("pattern", ["[abc]{2}(1|2)", "(a|b)*abc?", "[a-c]{2,5}|1*2"])
def test_bundles_are_the_classes_that_labels_have_in_common(pattern: str) -> None:
    found = automaton("regex", pattern)
    size = np.diff(found.label_first).astype(np.int64)
    bundles = LabelBundles.from_labels(found.members.astype(np.int64), size, found.classes)
    members = np.split(bundles.classes, bundles.bundle_size.cumsum()[:-1])
    parts = np.split(bundles.parts, bundles.label_size.cumsum()[:-1])
    labels = [{int(kind) for bundle in some for kind in members[bundle].tolist()} for some in parts]
    expected = [set(some.tolist()) for some in np.split(found.members, size.cumsum()[:-1])]
    assert labels == expected
    shared = [tuple(label for label in expected if kind in label) for kind in range(found.classes)]
    for bundle in members:
        assert len({str(shared[kind]) for kind in bundle.tolist()}) == 1
    assert len(bundles.classes) == len(set(bundles.classes.tolist())), "each class is in one"
