"""Dynamic programming against all paths, one by one; drawn paths against their distribution."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.constraints.every_path import best_path, every_path
from tests.constraints.helpers import (
    automaton,
    letters,
    on_device,
    text_of,
    together,
    window,
)
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.decoding.best_path import (
    FLOOR,
    CanvasWindow,
    ClassPaths,
    best_paths,
    drawn_paths,
)
from vllm_dllm.ops.noise.keyed import row_keys

PATTERNS = ["(a|b)*abc?", "[a-c]{2,5}|1*2", "(ab|ba)*", "a?b?c?", "(aa)*1?2", "(12|abc|é)+", "a*b*"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenAutomaton, torch.Tensor, CanvasWindow, int]:
    """An automaton, weights ``[L, C]``, and a window of one canvas, perhaps with forced tokens."""
    found = automaton("regex", draw(st.sampled_from(PATTERNS)))
    length = draw(st.integers(1, 5))
    first = draw(st.integers(0, length - 1))
    width = draw(st.integers(first, length))
    budget = draw(st.integers(0, 7))
    # Any state: canvases behind the first one begin inside of a text.
    state = draw(st.integers(0, found.states - 1))
    forced = [-1] * length
    for position in draw(st.lists(st.integers(0, length - 1), max_size=2)):
        forced[position] = draw(st.integers(0, len(letters()) - 1))
    seed = draw(st.integers(0, 2**32 - 1))
    weights = torch.randn(length, found.classes, generator=torch.Generator().manual_seed(seed)) * 3
    some = window(length, budget, state=state, first=first, width=width, forced=forced)
    return found, weights, some, budget - max(0, min(width - first, budget))


def inside(weights: torch.Tensor, some: CanvasWindow) -> tuple[list[list[float]], list[int]]:
    """What the window's positions weigh, and what is forced there."""
    first, end = int(some.first), int(some.end)
    return weights.double().tolist()[first:end], some.forced[0].tolist()[first:end]


def first_of(paths: ClassPaths, some: CanvasWindow) -> tuple[int, ...]:
    return tuple(paths.classes[0].tolist()[int(some.first) : int(some.end)])


@settings(max_examples=300)
@given(cases())
def test_the_best_path_is_the_best_of_all(
    case: tuple[TokenAutomaton, torch.Tensor, CanvasWindow, int],
) -> None:
    found, weights, some, left = case
    device, _ = on_device(found)
    paths = best_paths(device, weights[None], some)
    rows, forced = inside(weights, some)
    expected = best_path(found, rows, int(some.state), left, forced)
    assert bool(paths.feasible[0]) == (expected is not None)
    outside = ~some.inside()[0]
    assert (paths.classes[0][outside] == found.classes).all()
    if expected is None:
        return
    # Weights are random, so that there are no ties.
    assert first_of(paths, some) == expected[0]
    assert float(paths.weight[0]) == pytest.approx(expected[1], abs=1e-9)
    state = int(some.state)
    for kind in expected[0]:
        state = int(found.next[state, kind])
    assert int(paths.states[0, -1]) == state
    assert int(found.distance[state]) <= left


@settings(max_examples=100)
@given(cases())
def test_the_sum_of_all_paths_and_a_drawn_one(
    case: tuple[TokenAutomaton, torch.Tensor, CanvasWindow, int],
) -> None:
    found, weights, some, left = case
    device, _ = on_device(found)
    keys = row_keys(torch.tensor([[7]]), torch.arange(weights.shape[0]))
    paths = drawn_paths(device, weights[None], some, keys)
    rows, forced = inside(weights, some)
    every = dict(every_path(found, rows, int(some.state), left, forced))
    assert bool(paths.feasible[0]) == bool(every)
    if every:
        assert first_of(paths, some) in every
        total = math.log(sum(math.exp(weight) for weight in every.values()))
        assert float(paths.weight[0]) == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("forced", [(), (-1, 2)])
def test_drawn_paths_follow_the_conditional_distribution(forced: tuple[int, ...]) -> None:
    """40,000 draws; total variation within what so many draws of the truth would show."""
    found = automaton("regex", "(a|b)*abc?")
    device, _ = on_device(found)
    count, length = 40_000, 4
    weights = torch.randn(length, found.classes, generator=torch.Generator().manual_seed(3))
    some = window(length, 4, forced=forced)
    every = dict(every_path(found, *inside_first(weights, some), 0, some.forced[0].tolist()))
    probability = np.exp(np.array(list(every.values())))
    probability /= probability.sum()
    keys = row_keys(torch.arange(count)[:, None], torch.arange(length))
    many = CanvasWindow(*(t.expand(count, *t.shape[1:]) for t in vars(some).values()))
    paths = drawn_paths(device, weights.expand(count, -1, -1), many, keys)
    seen = Counter(map(tuple, paths.classes.tolist()))
    assert set(seen) <= set(every)
    got = np.array([seen[path] for path in every]) / count
    distance = np.abs(got - probability).sum() / 2
    rng = np.random.default_rng(0)
    usual = [
        np.abs(rng.multinomial(count, probability) / count - probability).sum() / 2
        for _ in range(200)
    ]
    assert len(every) > 5
    assert distance <= max(usual), f"{distance:.4f}, by chance at most {max(usual):.4f}"
    expected = probability * count
    often = expected >= 5
    chi = ((got[often] * count - expected[often]) ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def inside_first(weights: torch.Tensor, some: CanvasWindow) -> tuple[list[list[float]], int]:
    return weights.double().tolist(), int(some.state)


def test_canvases_of_a_batch_do_not_touch_each_other() -> None:
    found = automaton("regex", "(ab|ba)*c?")
    device, _ = on_device(found)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4, 6, found.classes, generator=generator)
    windows = [
        window(6, 9),
        window(6, 3, first=2),
        window(6, 6, forced=[4, -1, 3]),
        window(6, 40, width=3, first=1),
    ]
    keys = row_keys(torch.arange(4)[:, None], torch.arange(6))
    best = best_paths(device, weights, together(windows))
    drawn = drawn_paths(device, weights, together(windows), keys)
    for n, some in enumerate(windows):
        one = best_paths(device, weights[n : n + 1], some)
        assert torch.equal(one.classes[0], best.classes[n])
        one = drawn_paths(device, weights[n : n + 1], some, keys[n : n + 1])
        assert torch.equal(one.classes[0], drawn.classes[n])
        assert one.states[0].tolist() == drawn.states[n].tolist()


def tokens_of(found: TokenAutomaton, kinds: list[int]) -> bytes:
    """The text of the lowest tokens of some classes."""
    ids = [int(np.flatnonzero(found.class_of_token == kind)[0]) for kind in kinds]
    return text_of(letters(), ids)


@pytest.mark.parametrize("budget", [2, 3, 5, 8, 20])
def test_the_end_is_within_the_budget(budget: int) -> None:
    """However much the model would rather go on."""
    found = automaton("regex", "a+b")
    device, _ = on_device(found)
    weights = torch.zeros(1, 8, found.classes)
    weights[..., -1] = -50  # never end
    paths = best_paths(device, weights, window(8, budget))
    kinds = paths.classes[0].tolist()
    if budget <= 8:
        assert kinds.count(found.classes - 1) == 1, "the end is put off to the last moment"
        assert kinds[budget - 1] == found.classes - 1
        assert kinds[budget:] == [found.classes] * (8 - budget), "behind the budget is nothing"
        assert int(paths.states[0, -1]) == found.states - 1
    else:
        assert found.classes - 1 not in kinds
    assert not best_paths(device, weights, window(8, 1)).feasible[0]


def test_behind_the_end_there_is_only_the_end() -> None:
    found = automaton("choice", ["a", "ab"])
    device, _ = on_device(found)
    paths = best_paths(device, torch.zeros(1, 6, found.classes), window(6, 100))
    kinds = paths.classes[0].tolist()
    at = kinds.index(found.classes - 1)
    assert kinds[at:] == [found.classes - 1] * (6 - at)


def test_the_prompts_tail_is_not_read() -> None:
    found = automaton("choice", ["a", "ab"])
    device, _ = on_device(found)
    some = window(6, 10, first=3, forced=[5, 9, 12])  # no part of any choice
    paths = best_paths(device, torch.zeros(1, 6, found.classes), some)
    assert paths.feasible[0]
    assert paths.classes[0, :3].tolist() == [found.classes] * 3


def test_a_model_that_rules_out_all_that_is_allowed() -> None:
    """Also with weights that are no numbers: the constraint holds, whatever the model says."""
    found = automaton("regex", "ab")
    device, _ = on_device(found)
    for wrong in (-math.inf, math.nan):
        weights = torch.full((1, 4, found.classes), wrong)
        paths = best_paths(device, weights, window(4, 4))
        assert paths.feasible[0]
        assert tokens_of(found, paths.classes[0].tolist()) == b"ab"
        assert float(paths.weight[0]) == 4 * FLOOR
        drawn = drawn_paths(device, weights, window(4, 4), torch.zeros(1, 4, dtype=torch.int64))
        assert tokens_of(found, drawn.classes[0].tolist()) == b"ab"


def test_ties_go_to_the_lowest_class() -> None:
    found = automaton("regex", "[abc]{3}")
    device, _ = on_device(found)
    paths = best_paths(device, torch.zeros(1, 4, found.classes), window(4, 4))
    every = sorted(path for path, _ in every_path(found, [[0.0] * found.classes] * 4, 0, 0))
    assert tuple(paths.classes[0].tolist()) == every[0]
