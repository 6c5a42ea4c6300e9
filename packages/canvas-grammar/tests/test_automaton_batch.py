"""What the union of automata leaves out changes no path: deep states, and classes in bundles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from canvas_grammar.automaton.configurations import START
from canvas_grammar.automaton.windows import Window, window
from canvas_grammar.decoding.constrained_step import ConstrainedPath
from canvas_grammar.decoding.label_bundles import LabelBundles
from canvas_grammar.decoding.noise import row_keys
from canvas_grammar_support.helpers import automaton, together
from canvas_grammar_support.helpers import window as canvas
from canvas_grammar_support.joined import best, drawn, joined
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


@pytest.mark.parametrize("name", ALL)
def test_states_that_a_position_cannot_be_in_change_no_path(name: str) -> None:
    """Whatever has left the canvas already, and whichever canvases are beside it."""
    part = window(configurations_of(ALL[name], depth=8), START, LENGTH, 12)
    found, rng = part.automaton, np.random.default_rng(1)
    if not part.whole:
        assert part.depth is not None and part.depth[0] == 0 and part.depth.max() > 0
    tails = [0, 1, 3, LENGTH]
    windows = together([
        canvas(LENGTH, 90, state=walk(part, tail, rng), first=tail) for tail in tails
    ])  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(tails), LENGTH, found.classes + 1, generator=generator)
    keys = row_keys(torch.arange(len(tails))[:, None], torch.arange(LENGTH))
    inside = windows.inside()
    near, all_states = (joined(*[found] * len(tails), depth=d) for d in (part.depth, None))
    for one, two in (
        [best(each, weights, windows) for each in (near, all_states)],
        [drawn(each, weights, windows, keys) for each in (near, all_states)],
    ):
        assert one.feasible.tolist() == two.feasible.tolist()
        sound = one.feasible
        assert sound[0]
        assert torch.equal(one.classes[sound], two.classes[sound])
        assert torch.equal(one.states[sound], two.states[sound])
        torch.testing.assert_close(one.weight[sound], two.weight[sound], rtol=0, atol=1e-9)
        ended = [
            constraint.behind_end(ConstrainedPath(it.classes, it.weight, inside, it.states, sound))
            for constraint, it in ((near, one), (all_states, two))
        ]
        assert torch.equal(ended[0][sound], ended[1][sound])


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
