"""Dynamic programming against all paths, one by one; drawn paths against their distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from canvas_grammar.automaton.configurations import START
from canvas_grammar.automaton.graph import DEAD
from canvas_grammar.automaton.windows import TokenAutomaton, window
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath
from canvas_grammar_support.helpers import END, automaton, canvas, letters, text_of, together
from canvas_grammar_support.joined import (
    FORMS,
    Joined,
    drawn_freely,
    find,
    joined,
    token_paths,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_configurations import ALL
from test_configurations import compiled as configurations_of

from tests.support.ops.chi_square import follows
from vllm_dllm.ops.noise.keyed import row_keys

PATTERNS = ["(a|b)*abc?", "[a-c]{2,5}|1*2", "(ab|ba)*", "a?b?c?", "(aa)*1?2", "(12|abc|é)+", "a*b*"]
LENGTH, IDS = 5, len(letters())
Case = tuple[TokenAutomaton, torch.Tensor, CanvasWindow]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An automaton, logits ``[L, ids]``, and a window of one canvas, perhaps with forced tokens."""
    found = automaton("regex", draw(st.sampled_from(PATTERNS)))
    first = draw(st.integers(0, LENGTH - 1))
    width = draw(st.integers(first, LENGTH))
    budget = draw(st.integers(0, 7))
    # Any state: canvases after the first one begin inside of a text. The last one is dead.
    state = draw(st.integers(0, found.states))
    forced = [-1] * LENGTH
    for position in draw(st.lists(st.integers(0, LENGTH - 1), max_size=2)):
        forced[position] = draw(st.integers(0, IDS - 1))
    some = canvas(LENGTH, budget, state=state, first=first, width=width, forced=forced)
    return found, random_logits(draw(st.integers(0, 2**32 - 1))), some


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (LENGTH, IDS)), generator=generator) * 3


def target_of_class(found: TokenAutomaton) -> np.ndarray:
    """The state after each state and class, or `DEAD`; int64 ``[states + 1, classes]``."""
    target: np.ndarray = np.full((found.states + 1, found.classes), DEAD, dtype=np.int64)
    edges = zip(found.edge_source, found.edge_target, found.edge_label, strict=True)
    for source, after, label in edges:
        target[source, found.members[slice(*found.label_first[label:][:2])]] = after
    return target


def every_path(case: Case, *, draws: bool = False) -> dict[tuple[int, ...], float]:
    """The weight of each path through a canvas, by its classes.

    A class weighs as much as its largest logit, or for draws the logarithm of the sum of all their
    exponentials, and each position after the end of the text as much as all tokens together. Forced
    positions weigh nothing.
    """
    found, logits, some = case
    target, forced, rows = target_of_class(found), some.forced[0].tolist(), logits.double()
    first, end = int(some.first), int(some.end)
    left = int(some.budget) - (end - first)
    last = found.states - 1

    def weight(place: int, state: int, kind: int) -> float:
        members = torch.from_numpy(found.class_of_token == kind) | (state == last)
        own = rows[place, members]
        return float(own.logsumexp(0) if draws else own.max()) if forced[place] < 0 else 0.0

    def paths(place: int, state: int) -> Iterator[tuple[tuple[int, ...], float]]:
        if place == end:
            if state < found.states and found.distance[state] <= left:
                yield (), 0.0
            return
        kinds = range(found.classes)
        if forced[place] >= 0:
            kinds = [kind for kind in kinds if kind == found.class_of_token[forced[place]]]
        for kind in kinds:
            if (after := int(target[state, kind])) != DEAD:
                own = weight(place, state, kind)
                for path, rest in paths(place + 1, after):
                    yield (kind, *path), own + rest

    return dict(paths(first, int(some.state)))


def batch_of(cases: list[Case]) -> tuple[Joined, torch.Tensor, CanvasWindow, torch.Tensor]:
    """What canvases follow, their logits, windows and keys."""
    logits = torch.stack([logits for _, logits, _ in cases])
    keys = row_keys(torch.arange(len(cases))[:, None], torch.arange(LENGTH))
    return joined(*(found for found, _, _ in cases)), logits, together(w for *_, w in cases), keys


def check_path(case: Case, path: ConstrainedPath, *, best: bool) -> tuple[int, ...]:
    """Check the tokens and states of a path, and return the classes of its tokens."""
    found, logits, some = case
    forced, tokens = some.forced[0].tolist(), path.token[0].tolist()
    state, states, kinds = int(some.state), path.states[0].tolist(), list[int]()
    assert states[0] == state, "it does not stray, where there is none"
    margin = logits.gather(1, path.token[0, :, None])[:, 0] - logits.amax(1)
    assert not path.feasible or torch.equal(path.margin[0], margin)
    for position, token in enumerate(tokens):
        inside = bool(path.inside[0, position] & path.feasible[0])
        if forced[position] >= 0 and position < some.end:
            assert token == forced[position]
        elif not inside:
            assert token == END
        if inside:
            kind = int(found.class_of_token[token])
            kinds.append(kind)
            assert bool(path.after_end[0, position]) == (state == found.states - 1)
            if best and forced[position] < 0:
                members = np.flatnonzero(found.class_of_token == kind)
                assert token == members[int(logits[position, members].argmax())]
            state = int(target_of_class(found)[state, kind])
        assert states[position + 1] == state
    return tuple(kinds)


# The interpreter is slow.
EACH_FORM = pytest.mark.parametrize(
    ("form", "examples"),
    [("cpu", 150), ("triton", 6), pytest.param("triton", 150, marks=pytest.mark.long)],
)


@EACH_FORM
def test_the_best_path_a_drawn_one_and_the_sum_of_all(form: str, examples: int) -> None:
    """Of each canvas, in a batch of canvases with automata, windows and budgets of their own."""

    @settings(max_examples=examples)
    @given(st.lists(cases(), min_size=1, max_size=4))
    def run(batch: list[Case]) -> None:
        constraint, logits, windows, keys = batch_of(batch)
        for draws in (False, True):
            free = drawn_freely(logits, keys)
            paths, weights = find(form, constraint, logits, windows, free, draws)
            assert torch.equal(paths.inside, windows.inside())
            for n, case in enumerate(batch):
                every = every_path(case, draws=draws)
                assert bool(paths.feasible[n]) == bool(every)
                kinds = check_path(case, paths.part(slice(n, n + 1)), best=not draws)
                if not every:
                    continue
                total = max(every.values())
                if draws:
                    assert kinds in every
                    total = float(torch.tensor(list(every.values())).double().logsumexp(0))
                else:  # logits are random, so that there are no ties
                    assert kinds == max(every, key=every.__getitem__)
                assert float(weights[n]) == pytest.approx(total, abs=1e-5)

    run()


@EACH_FORM
def test_company_changes_no_bit(form: str, examples: int) -> None:
    """Each canvas alone has the paths, states and weights that it has in the batch."""

    @settings(max_examples=examples // 2)
    @given(st.lists(cases(), min_size=2, max_size=3))
    def run(batch: list[Case]) -> None:
        constraint, logits, windows, keys = batch_of(batch)
        for draws in (False, True):
            free = drawn_freely(logits, keys)
            every, weights = find(form, constraint, logits, windows, free, draws)
            for n, (found, _, _) in enumerate(batch):
                own = slice(n, n + 1)
                alone, weight = find(
                    form, joined(found), logits[own], windows.part(own),
                    drawn_freely(logits[own], keys[own]), draws,
                )  # fmt: skip
                assert torch.equal(weights[own], weight)
                for name, tensor in vars(alone).items():
                    assert torch.equal(getattr(every, name)[own], tensor), name

    run()


@pytest.mark.parametrize(
    "name",
    [n if n == "nested" else pytest.param(n, marks=pytest.mark.long) for n in ALL],
)
def test_larger_automata(name: str) -> None:
    """Both forms find the same paths, wherever in a text a canvas begins."""
    length, tails, rng = 8, [0, 1, 3, 8], np.random.default_rng(1)
    found = window(configurations_of(ALL[name], depth=8), START, length, 12).automaton

    def after(steps: int) -> int:
        """A state that some tokens lead to from the first one."""
        state = 0
        for _ in range(steps):
            targets = found.edge_target[found.edge_source == state]
            state = int(rng.choice(targets)) if len(targets) else state
        return state

    windows = together([canvas(length, 90, state=after(n), first=n) for n in tails])
    logits = random_logits(0, len(tails), length, len(found.class_of_token))
    keys = row_keys(torch.arange(len(tails))[:, None], torch.arange(length))
    for given_keys in (None, keys):
        one, two = (
            token_paths(joined(*[found] * len(tails)), logits, windows, given_keys, form)
            for form in FORMS
        )
        sound = one.feasible
        assert sound[0] and torch.equal(sound, two.feasible)
        for attribute in ("token", "states", "after_end"):
            assert torch.equal(getattr(one, attribute)[sound], getattr(two, attribute)[sound])


@pytest.mark.parametrize("forced", [(), (-1, 2)])
def test_drawn_paths_follow_the_conditional_distribution(forced: tuple[int, ...]) -> None:
    """8,000 draws for each of two automata, drawn together.

    The seeds are fixed. With other ones, a right implementation fails each of the four checks with
    a probability of 0.001.
    """
    count = 8_000
    automata = [automaton("regex", "(a|b)*abc?"), automaton("regex", "[a-c]{2,3}")]
    some, rows = canvas(4, 4, forced=forced), random_logits(3, 2, 4, IDS)
    keys = row_keys(torch.arange(2 * count)[:, None], torch.arange(4))
    many = CanvasWindow(*(t.expand(2 * count, *t.shape[1:]) for t in vars(some).values()))
    paths = token_paths(joined(*automata * count), rows.repeat(count, 1, 1), many, keys)
    for n, found in enumerate(automata):
        every = every_path((found, rows[n], some), draws=True)
        seen = Counter(map(tuple, found.class_of_token[paths.token[n::2]].tolist()))
        assert set(seen) <= set(every) and len(every) > 2
        order = {path: n for n, path in enumerate(every)}
        numbers = torch.tensor([order[path] for path in seen.elements()])
        assert follows(numbers, torch.tensor(list(every.values())).double().softmax(0))


@pytest.mark.parametrize("wrong", [-math.inf, math.nan])
def test_a_model_that_rules_out_all_that_is_allowed(wrong: float) -> None:
    """Also with logits that are no numbers: the constraint holds, whatever the model says."""
    logits = torch.full((1, 4, IDS), wrong)
    logits[..., 3] = 0  # a letter that is not allowed
    for keys in (None, torch.zeros(1, 4, dtype=torch.int64)):
        paths = token_paths(joined(automaton("regex", "ab")), logits, canvas(4, 4), keys)
        assert paths.feasible[0]
        assert text_of(letters(), paths.token[0].tolist()) == b"ab"


@pytest.mark.parametrize("pattern", ["[abc]{3}", "(a|bc|ab)(c|1|2)c?", "(aa)*1?2"])
def test_ties_go_to_the_edge_of_the_lowest_class(pattern: str) -> None:
    """Where all paths weigh the same, each position takes the lowest class that can be finished."""
    found, logits = automaton("regex", pattern), torch.zeros(4, IDS)
    every = sorted(every_path((found, logits, canvas(4, 4))))
    assert len(every) > 1
    tokens = token_paths(joined(found), logits[None], canvas(4, 4)).token[0]
    assert tuple(found.class_of_token[tokens].tolist()) == every[0]


def test_ties_within_a_label_go_to_the_lowest_class() -> None:
    found, logits = automaton("regex", "[abc][12]"), torch.zeros(1, 3, IDS)
    by_class = sorted((1, 2, 3), key=lambda token: found.class_of_token[token])
    logits[0, 0, by_class[-1]] = -1
    assert int(token_paths(joined(found), logits, canvas(3, 3)).token[0, 0]) == by_class[0]


def test_the_order_of_edges_does_not_depend_on_the_numbers_of_states() -> None:
    """So neither do ties and random numbers: an automaton may be replaced by an equal one."""
    found = automaton("regex", "([a-c]{2,5}|1*2)(ab|ba)*")
    order = np.random.default_rng(1).permutation(found.states - 2) + 1
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
    logits = random_logits(1, 1, 8, IDS).round()  # with ties
    for keys in (None, row_keys(torch.tensor([[3]]), torch.arange(8))):
        one, two = (token_paths(joined(f), logits, canvas(8, 20), keys) for f in (found, other))
        assert torch.equal(one.token, two.token)
        assert number[one.states[0].numpy()].tolist() == two.states[0].tolist()
