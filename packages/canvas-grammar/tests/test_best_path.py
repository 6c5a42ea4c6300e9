"""Dynamic programming against all paths, one by one; drawn paths against their distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.best_path import FLOOR, CanvasWindow
from canvas_grammar_support.chi_square import chi_square, limit
from canvas_grammar_support.every_path import best_path, every_path, target_of_class
from canvas_grammar_support.helpers import automaton, letters, text_of, together, window
from canvas_grammar_support.joined import FORMS, ClassPaths, best, drawn, joined, with_no_class
from canvas_grammar_support.noise import row_keys
from hypothesis import given, settings
from hypothesis import strategies as st

PATTERNS = ["(a|b)*abc?", "[a-c]{2,5}|1*2", "(ab|ba)*", "a?b?c?", "(aa)*1?2", "(12|abc|é)+", "a*b*"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenAutomaton, torch.Tensor, CanvasWindow, int]:
    """An automaton, weights ``[L, C]``, and a window of one canvas, perhaps with forced tokens."""
    found = automaton("regex", draw(st.sampled_from(PATTERNS)))
    length = draw(st.integers(1, 5))
    first = draw(st.integers(0, length - 1))
    width = draw(st.integers(first, length))
    budget = draw(st.integers(0, 7))
    # Any state: canvases after the first one begin inside of a text.
    state = draw(st.integers(0, found.states - 1))
    forced = [-1] * length
    for position in draw(st.lists(st.integers(0, length - 1), max_size=2)):
        forced[position] = draw(st.integers(0, len(letters()) - 1))
    seed = draw(st.integers(0, 2**32 - 1))
    weights = torch.randn(length, found.classes, generator=torch.Generator().manual_seed(seed)) * 3
    some = window(length, budget, state=state, first=first, width=width, forced=forced)
    return found, weights, some, budget - max(0, min(width - first, budget))


def inside(weights: torch.Tensor, some: CanvasWindow) -> tuple[list[Any], list[int]]:
    """What the window's positions weigh, and what is forced there; forced positions weigh 0."""
    first, end = int(some.first), int(some.end)
    free = (weights.double().t() * (some.forced[0] < 0)).t()
    return free.tolist()[first:end], some.forced[0].tolist()[first:end]


def whole_of(weights: torch.Tensor) -> torch.Tensor:
    """What all tokens weigh together, ``[n, L]``, for weights ``[n, L, C]``; more than others."""
    return 20 + weights[..., 0]


def first_of(paths: ClassPaths, some: CanvasWindow, canvas: int = 0) -> tuple[int, ...]:
    return tuple(paths.classes[canvas].tolist()[int(some.first) : int(some.end)])


Case = tuple[TokenAutomaton, torch.Tensor, CanvasWindow, int]


def padded(batch: list[Case]) -> tuple[torch.Tensor, CanvasWindow]:
    """The weights and windows of canvases that are as long as the longest of them."""
    length = max(len(weights) for _, weights, _, _ in batch)
    pad = torch.nn.functional.pad
    weights = [pad(one, (0, 0, 0, length - len(one))) for _, one, _, _ in batch]
    windows = []
    for _, one, some, _ in batch:
        forced = pad(some.forced, (0, length - len(one)), value=-1)
        windows.append(CanvasWindow(some.state, some.first, some.budget, some.width, forced))
    return with_no_class(weights), together(windows)


def for_each_form(*, examples: int, few: int, least: int = 1, most: int = 3) -> Any:
    """Run a check of a form and a batch with hypothesis; the interpreter is slow."""

    def decorated(check: Callable[[str, list[Case]], None]) -> Any:
        @pytest.mark.parametrize("form", [*FORMS, pytest.param("more", marks=pytest.mark.long)])
        def test(form: str) -> None:
            @settings(max_examples=few if form == "triton" else examples)
            @given(st.lists(cases(), min_size=least, max_size=most))
            def run(batch: list[Case]) -> None:
                check("triton" if form == "more" else form, batch)

            run()

        test.__doc__ = check.__doc__
        return test

    return decorated


@for_each_form(examples=150, few=4, most=4)
def test_the_best_path_is_the_best_of_all(form: str, batch: list[Case]) -> None:
    """Of each canvas, in a batch of canvases with automata, windows and budgets of their own."""
    constraint = joined(*(found for found, _, _, _ in batch))
    weights, windows = padded(batch)
    paths = best(constraint, weights, windows, whole_of(weights), form)
    for n, (found, own, some, left) in enumerate(batch):
        rows, forced = inside(own, some)
        whole, _ = inside(whole_of(own[None])[0], some)
        expected = best_path(found, rows, int(some.state), left, forced, whole)
        assert bool(paths.feasible[n]) == (expected is not None)
        outside = ~windows.inside()[n]
        assert (paths.classes[n][outside] == weights.shape[2] - 1).all()
        if expected is None:
            assert (paths.states[n] == some.state).all(), "it does not stray to other automata"
            continue
        # Weights are random, so that there are no ties.
        assert first_of(paths, some, n) == expected[0]
        assert float(paths.weight[n]) == pytest.approx(expected[1], abs=1e-9)
        state, target = int(some.state), target_of_class(found)
        for kind in expected[0]:
            state = int(target[state, kind])
        assert int(paths.states[n, -1]) == state
        assert int(found.distance[state]) <= left


@for_each_form(examples=75, few=4)
def test_the_sum_of_all_paths_and_a_drawn_one(form: str, batch: list[Case]) -> None:
    constraint = joined(*(found for found, _, _, _ in batch))
    weights, windows = padded(batch)
    keys = row_keys(torch.arange(len(batch))[:, None], torch.arange(weights.shape[1]))
    paths = drawn(constraint, weights, windows, keys, whole_of(weights), form)
    for n, (found, own, some, left) in enumerate(batch):
        rows, forced = inside(own, some)
        whole, _ = inside(whole_of(own[None])[0], some)
        every = dict(every_path(found, rows, int(some.state), left, forced, whole))
        assert bool(paths.feasible[n]) == bool(every)
        if every:
            assert first_of(paths, some, n) in every
            total = math.log(sum(math.exp(weight) for weight in every.values()))
            assert float(paths.weight[n]) == pytest.approx(total, abs=1e-9)


@for_each_form(examples=75, few=2, least=2)
def test_company_changes_no_bit(form: str, batch: list[Case]) -> None:
    """Each canvas alone has the paths, states and weights that it has in the batch."""
    weights, windows = padded(batch)
    length = weights.shape[1]
    keys = row_keys(torch.arange(len(batch))[:, None], torch.arange(length))
    constraint = joined(*(found for found, _, _, _ in batch))
    in_batch = (
        best(constraint, weights, windows, form=form),
        drawn(constraint, weights, windows, keys, form=form),
    )
    for n, (found, own, _, _) in enumerate(batch):
        alone, one = joined(found), windows.part(slice(n, n + 1))
        padding = torch.nn.functional.pad(own, (0, 0, 0, length - len(own)))
        mine = with_no_class([padding])
        pair = (
            best(alone, mine, one, form=form),
            drawn(alone, mine, one, keys[n : n + 1], form=form),
        )
        for together_, single in zip(in_batch, pair, strict=True):
            assert torch.equal(together_.weight[n], single.weight[0])
            if single.feasible[0]:
                inside_ = one.inside()[0]
                assert torch.equal(together_.classes[n][inside_], single.classes[0][inside_])
                assert torch.equal(together_.states[n], single.states[0])


@pytest.mark.parametrize("forced", [(), (-1, 2)])
def test_drawn_paths_follow_the_conditional_distribution(forced: tuple[int, ...]) -> None:
    """8,000 draws for each of two automata, drawn together.

    The seeds are fixed. With other ones, a right implementation fails each of the four checks with
    a probability of 0.001.
    """
    count, length = 8_000, 4
    automata = [automaton("regex", "(a|b)*abc?"), automaton("regex", "[a-c]{2,3}")]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(length, found.classes, generator=generator) for found in automata]
    some = window(length, 4, forced=forced)
    constraint = joined(*automata * count)
    keys = row_keys(torch.arange(2 * count)[:, None], torch.arange(length))
    many = CanvasWindow(*(t.expand(2 * count, *t.shape[1:]) for t in vars(some).values()))
    paths = drawn(constraint, with_no_class(weights).repeat(count, 1, 1), many, keys)
    for n, found in enumerate(automata):
        rows, held = inside(weights[n], some)
        every = dict(every_path(found, rows, 0, 0, held))
        probability = np.exp(np.array(list(every.values())))
        probability /= probability.sum()
        seen = Counter(map(tuple, paths.classes[n::2].tolist()))
        assert set(seen) <= set(every)
        assert len(every) > 2 and probability.min() * count > 5
        order = {path: n for n, path in enumerate(every)}
        number = torch.tensor([order[path] for path in seen.elements()])
        assert chi_square(number, torch.from_numpy(probability)) < limit(len(every))


def tokens_of(found: TokenAutomaton, kinds: list[int]) -> bytes:
    """The text of the lowest tokens of some classes."""
    ids = [int(np.flatnonzero(found.class_of_token == kind)[0]) for kind in kinds]
    return text_of(letters(), ids)


@pytest.mark.parametrize("budget", [2, 3, 5, 8, 20])
def test_the_end_is_within_the_budget(budget: int) -> None:
    """However much the model would rather go on."""
    found = automaton("regex", "a+b")
    constraint = joined(found)
    weights = torch.zeros(1, 8, found.classes + 1)
    weights[..., found.classes - 1] = -50  # never end
    paths = best(constraint, weights, window(8, budget))
    kinds = paths.classes[0].tolist()
    if budget <= 8:
        assert kinds.count(found.classes - 1) == 1, "the end is put off to the last moment"
        assert kinds[budget - 1] == found.classes - 1
        assert kinds[budget:] == [found.classes] * (8 - budget), "after the budget is nothing"
        assert int(paths.states[0, -1]) == found.states - 1
    else:
        assert found.classes - 1 not in kinds
    assert not best(constraint, weights, window(8, 1)).feasible[0]


def test_after_the_end_there_is_only_the_end() -> None:
    found = automaton("choice", ["a", "ab"])
    constraint = joined(found)
    paths = best(constraint, torch.zeros(1, 6, found.classes + 1), window(6, 100))
    kinds = paths.classes[0].tolist()
    at = kinds.index(found.classes - 1)
    assert kinds[at:] == [found.classes - 1] * (6 - at)


def test_the_prompts_tail_is_not_read() -> None:
    found = automaton("choice", ["a", "ab"])
    constraint = joined(found)
    some = window(6, 10, first=3, forced=[5, 9, 12])  # no part of any choice
    paths = best(constraint, torch.zeros(1, 6, found.classes + 1), some)
    assert paths.feasible[0]
    assert paths.classes[0, :3].tolist() == [found.classes] * 3


def test_a_model_that_rules_out_all_that_is_allowed() -> None:
    """Also with weights that are no numbers: the constraint holds, whatever the model says."""
    found = automaton("regex", "ab")
    constraint = joined(found)
    for wrong in (-math.inf, math.nan):
        weights = torch.full((1, 4, found.classes + 1), wrong)
        paths = best(constraint, weights, window(4, 4))
        assert paths.feasible[0]
        assert tokens_of(found, paths.classes[0].tolist()) == b"ab"
        assert float(paths.weight[0]) == 4 * FLOOR
        keys = torch.zeros(1, 4, dtype=torch.int64)
        paths = drawn(constraint, weights, window(4, 4), keys)
        assert tokens_of(found, paths.classes[0].tolist()) == b"ab"


@pytest.mark.parametrize("pattern", ["[abc]{3}", "(a|bc|ab)(c|1|2)c?", "(aa)*1?2"])
def test_ties_go_to_the_edge_of_the_lowest_class(pattern: str) -> None:
    """Where all paths weigh the same, each position takes the lowest class that can be finished."""
    found = automaton("regex", pattern)
    paths = best(joined(found), torch.zeros(1, 4, found.classes + 1), window(4, 4))
    every = sorted(path for path, _ in every_path(found, [[0.0] * found.classes] * 4, 0, 0))
    assert len(every) > 1
    assert tuple(paths.classes[0].tolist()) == every[0]


def test_ties_within_a_label_go_to_the_lowest_class() -> None:
    found = automaton("regex", "[abc][12]")
    weights = torch.zeros(1, 3, found.classes + 1)
    kinds = sorted({int(found.class_of_token[token]) for token in (1, 2, 3)})
    weights[0, 0, kinds[-1]] = -1
    paths = best(joined(found), weights, window(3, 3))
    assert int(paths.classes[0, 0]) == kinds[0]


def test_the_order_of_edges_does_not_depend_on_the_numbers_of_states() -> None:
    """So neither do ties and random numbers: an automaton may be replaced by an equal one."""
    found = automaton("regex", "([a-c]{2,5}|1*2)(ab|ba)*")
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(found.states - 2, generator=generator).numpy() + 1
    number = np.concatenate([[0], order, [found.states - 1]])  # from old to new
    source = number[found.edge_source]
    by_source = np.argsort(source, kind="stable")
    other = replace(
        found,
        distance=found.distance[np.argsort(number)],
        edge_source=source[by_source],
        edge_target=number[found.edge_target][by_source],
        edge_label=found.edge_label[by_source],
    )
    weights = torch.randn(1, 8, found.classes + 1, generator=generator).round()  # with ties
    keys = row_keys(torch.tensor([[3]]), torch.arange(8))
    some = window(8, 20)
    for paths in (best, lambda *of: drawn(*of, keys)):
        one, two = (paths(joined(each), weights, some) for each in (found, other))
        assert torch.equal(one.classes, two.classes)
        assert number[one.states[0].numpy()].tolist() == two.states[0].tolist()


def test_a_forced_token_of_no_class_leaves_no_path() -> None:
    found, other = automaton("choice", ["a"]), automaton("regex", "([a-c]{2,5}|1*2)(ab|ba)*")
    token = len(letters()) - 1  # it writes nothing
    windows = together([window(3, 3, forced=[token]), window(3, 9)])
    weights = torch.zeros(2, 3, max(found.classes, other.classes) + 1)
    assert best(joined(found, other), weights, windows).feasible.tolist() == [False, True]


def test_a_dead_state_leaves_no_path() -> None:
    """A request whose output has left its constraint stays dead, and touches no other."""
    found, other = automaton("choice", ["a"]), automaton("regex", "(ab|ba)*c?")
    dead = [window(3, 9, state=each.states) for each in (found, other)]
    weights = torch.zeros(3, 3, max(found.classes, other.classes) + 1)
    paths = best(joined(found, other, other), weights, together([*dead, window(3, 9)]))
    assert paths.feasible.tolist() == [False, False, True]
    assert paths.states[:2].tolist() == [[found.states] * 4, [other.states] * 4]
