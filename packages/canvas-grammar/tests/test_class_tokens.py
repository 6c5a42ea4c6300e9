"""From logits to weights and tokens of classes, against one class after the other."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from canvas_grammar.automaton.pushdown import NO_CLASS
from canvas_grammar.automaton.tables import CHUNK, Column, class_tables
from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath, FreeTokens
from canvas_grammar.decoding.path_finder import PathStep, PlannedCanvas
from canvas_grammar_support.helpers import canvas, together
from canvas_grammar_support.joined import (
    FORMS,
    Joined,
    drawn_freely,
    find,
    finder_of,
    garbage,
    joined,
)

from tests.support.ops.chi_square import follows
from vllm_dllm.ops.noise.keyed import row_keys

IDS, LENGTH = 6000, 7
EPSILON = torch.finfo(torch.float32).eps


def classes_of(seed: int, classes: int = 9) -> np.ndarray:
    """Some large, some of one token, and tokens of no class."""
    rng = np.random.default_rng(seed)
    share = np.array([0.75, 0.1, 0.03, 0.05, 0.001, 0.001, 0.0005, 0.01, 0.01])[:classes]
    kinds = rng.choice([*range(classes), NO_CLASS], size=IDS, p=[*share, 1 - share.sum()])
    kinds[500] = classes - 2
    return kinds


KINDS = [classes_of(0), classes_of(1, 5)]


def that_allows(kinds: np.ndarray, *allowed: int) -> TokenAutomaton:
    """An automaton that goes on with any tokens of some classes, one label for each class."""
    classes = int(kinds.max()) + 1
    end = (classes - 1,)
    labels = [(kind,) for kind in allowed if kind != classes - 1]
    count = len(labels)
    return TokenAutomaton(
        class_of_token=kinds,
        distance=np.array([1] * (count + 1) + [0]),
        # Each label has a state of its own, because no two edges of a state have the same target.
        edge_source=np.arange(count + 2).repeat([count + 1] * (count + 1) + [1]),
        edge_target=np.array([*range(1, count + 2)] * (count + 1) + [count + 1]),
        edge_label=np.array([*range(count + 1)] * (count + 1) + [count]),
        members=np.concatenate([*labels, end]).astype(np.int64),
        label_first=np.arange(count + 2),
        classes=classes,
    )


def logits_of(seed: int, canvases: int = 2, *, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(canvases, LENGTH, IDS, generator=generator) * 4
    logits[..., [kinds.max() for kinds in KINDS]] -= 50
    return logits.round() if ties else logits


def keys_of(canvases: int, length: int = LENGTH) -> torch.Tensor:
    return row_keys(torch.arange(canvases)[:, None], torch.arange(length))


def windows(canvases: int = 2, length: int = LENGTH) -> CanvasWindow:
    return together([canvas(length, 10 * length)] * canvases)


def without_ends(logits: torch.Tensor, constraint: Joined) -> torch.Tensor:
    """The same logits, and no reason to end a text."""
    for row, found in zip(logits, constraint.found, strict=True):
        row[:, torch.from_numpy(found.class_of_token == found.classes - 1)] = -1e5
    return logits


def of_kind(kind: int) -> Joined:
    return joined(*(that_allows(kinds, kind) for kinds in KINDS))


@pytest.mark.parametrize(
    ("form", "ties", "dtype"),
    [
        pytest.param(
            *(form, ties, dtype),
            marks=[pytest.mark.long] if form == "triton" and dtype != torch.bfloat16 else [],
        )
        for form in FORMS
        for ties in (False, True)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if form != "triton" or ties or dtype != torch.bfloat16
    ],
)
def test_the_largest_and_the_sum_of_each_class(form: str, ties: bool, dtype: torch.dtype) -> None:
    for kind in (0, 1, 3):
        constraint = of_kind(kind)
        logits = without_ends(logits_of(1, ties=ties), constraint).to(dtype)
        logits.clamp_min_(-6e4)
        path, weight = find(
            form, constraint, logits, windows(), drawn_freely(logits, keys_of(2)), False
        )
        free = drawn_freely(logits, keys_of(2))
        drawn, total = find(form, constraint, logits, windows(), free, True)
        for n, kinds in enumerate(KINDS):
            ids = torch.from_numpy(np.flatnonzero(kinds == kind))
            some = logits[n][:, ids].float()
            assert torch.equal(path.token[n], ids[some.argmax(1)]), "ties go to the lowest id"
            assert float(weight[n]) == float(some.amax(1).double().sum())
            exact = some.double().logsumexp(1).sum()
            # A sum of each position in float32, or that of a row and of its rest, which doubles it.
            error = 8 * EPSILON * some.double().logsumexp(1).abs().clamp_min(1).sum()
            assert abs(float(total[n] - exact)) <= float(error)
            assert (kinds[drawn.token[n].numpy()] == kind).all()
            margin = logits[n].gather(1, drawn.token[n][:, None])[:, 0].float()
            assert torch.equal(drawn.margin[n], margin - logits[n].float().amax(1))


def test_canvases_of_a_larger_batch_in_any_order() -> None:
    """Best and drawn, together or not, read from all logits or from those of some canvases."""
    constraint = joined(*(that_allows(kinds, 0, 1, 3) for kinds in KINDS))
    logits, every = logits_of(4, 5), windows(5)
    temperature = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.7])
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    free = replace(drawn_freely(logits / divisor, keys_of(5)), temperature=temperature)
    canvases = [
        PlannedCanvas(at, constraint.automata[n % 2], constraint.classes[n % 2], best, draws)
        for n, (at, best, draws) in enumerate([(3, True, True), (0, False, True), (2, True, False)])
    ]

    def paths(form: str, *reads: tuple[range, torch.Tensor]) -> tuple[ConstrainedPath, ...]:
        finder, path = finder_of(form), ConstrainedPath.empty(every)
        before, second = path.token.clone(), path.like()
        garbage(vars(second).values())
        step = PathStep(finder.plan(canvases), every, free, path, second)
        for some, rows in reads:
            finder.read(step, some, rows)
        finder.follow(step)
        assert torch.equal(path.token[[1, 4]], before[[1, 4]]) and not path.inside[[1, 4]].any()
        return path.part([3, 0, 2]), second.part([3])

    wanted = paths("cpu", (range(3), logits))
    in_parts = (range(1), logits[[3]]), (range(1, 3), logits[[0, 2]])
    for found in (
        paths("cpu", *in_parts), paths("triton", (range(3), logits)), paths("triton", *in_parts)
    ):  # fmt: skip
        for one, two in zip(found, wanted, strict=True):
            for name, tensor in vars(one).items():
                assert torch.equal(tensor, getattr(two, name)), name


def test_a_wide_class_is_read_only_where_its_weight_is_not_known() -> None:
    """Not where the token without a constraint is in it, unless other tokens weigh as much."""
    constraint = joined(that_allows(KINDS[0], 0))
    logits = without_ends(logits_of(7, 1), constraint)
    wide = torch.from_numpy(np.flatnonzero(KINDS[0] == 0))
    other = int(np.flatnonzero(KINDS[0] == 1)[0])
    assert constraint.classes[0][Column.WIDE] == 0
    logits[0, :, wide[5]] = 40  # what nobody claims to be the likeliest token
    likeliest = torch.full((1, LENGTH), int(wide[9]))
    likeliest[0, 0] = other
    free = FreeTokens(likeliest, likeliest, torch.ones(1, LENGTH), keys_of(1))
    path, _ = find("cpu", constraint, logits, windows(1), free, False)
    assert path.token[0].tolist() == [int(wide[5])] + [int(wide[9])] * (LENGTH - 1)
    # The whole row weighs as much as its other tokens: the sum of the class is no difference.
    logits[0, :, wide[9]] = logits[0, :, ~torch.isin(torch.arange(IDS), wide)].logsumexp(1)
    _, total = find("cpu", constraint, logits, windows(1), free, True)
    exact = logits[0][:, wide].double().logsumexp(1).sum()
    assert abs(float(total[0] - exact)) <= 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_extreme_logits(form: str) -> None:
    """A class keeps its weight however far it is below the rest of its row."""
    for kind in range(2):
        constraint = of_kind(kind)
        logits = logits_of(5)
        logits[:, 0] -= 1e4
        logits[:, 1] = logits[:, 1] * 1e-3 + 300
        for n, kinds in enumerate(KINDS):
            logits[n, 2, torch.from_numpy(kinds == 0)] += 500
            logits[n, 3, torch.from_numpy(kinds == 3)] = 1e4
            logits[n, 4, torch.from_numpy(kinds == 3)] = -math.inf
        logits = without_ends(logits, constraint)
        _, total = find(form, constraint, logits, windows(), drawn_freely(logits, keys_of(2)), True)
        for n, kinds in enumerate(KINDS):
            exact = logits[n][:, torch.from_numpy(kinds == kind)].double().logsumexp(1)
            error = 8 * EPSILON * float(exact.abs().sum())
            assert float(total[n]) == pytest.approx(float(exact.sum()), abs=error)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(wrong: float, form: str) -> None:
    """Such a request fails, but until then every token must be an id of its class."""
    for kind in (0, 3):
        constraint = of_kind(kind)
        logits = without_ends(logits_of(6), constraint)
        logits[:, :, ::7] = wrong
        logits[:, 0] = wrong
        free = drawn_freely(logits_of(6), keys_of(2))
        for draws in (False, True):
            path, _ = find(form, constraint, logits, windows(), free, draws)
            for n, kinds in enumerate(KINDS):
                found = kinds[path.token[n].numpy()]
                assert set(found.tolist()) <= {kind, constraint.found[n].classes - 1}


@pytest.mark.parametrize("form", FORMS)
def test_excluded_tokens(form: str) -> None:
    """A class of -inf alone is no error: its lowest token stands for it, or any of them."""
    kinds = np.array([0, 0, 1, 1, 2, NO_CLASS])
    constraint = joined(that_allows(kinds, 1))
    row = torch.tensor([1.0, -math.inf, -math.inf, -math.inf, -math.inf, 5.0])
    constraint = joined(*constraint.found * 24)
    logits = row.expand(24, 1, -1)
    free = drawn_freely(logits, keys_of(24, 1))
    best, _ = find(form, constraint, logits, windows(24, 1), free, False)
    drawn, _ = find(form, constraint, logits, windows(24, 1), free, True)
    assert best.token.unique().tolist() == [2]
    assert {2, 3} <= set(drawn.token[:, 0].tolist()) <= {2, 3, 4}


@pytest.mark.parametrize("kind", [0, 1])
def test_drawn_tokens_follow_the_softmax_of_their_class(kind: int) -> None:
    """Of a class of several ranges of chunks, and of one that no chunk is full of; in bins."""
    count, length, ids = 40, 256, 9001
    kinds = np.where(np.arange(ids) % 100 == 0, 1, 0)
    kinds[-1] = 2
    logits = torch.randn(ids, generator=torch.Generator().manual_seed(5))
    logits[-1] = -1e5
    classes = class_tables(kinds, 3)
    after, first = (classes.table(c, 1) for c in (Column.END_CHUNK, Column.FIRST_CHUNK))
    assert int(after - first) > 2 * CHUNK
    constraint = joined(*[that_allows(kinds, kind)] * count)
    whole = logits.expand(count, length, -1)
    # A free token of the other class, so that every token is drawn within its class.
    other = torch.full((count, length), 50 if kind else 100)
    share = (logits[other] - logits.logsumexp(0)).exp()
    free = FreeTokens(other, other, share, keys_of(count, length))
    drawn = find("cpu", constraint, whole, windows(count, length), free, True)[0].token.flatten()
    assert (kinds[drawn.numpy()] == kind).all()
    bins = (torch.arange(ids) // 100).clamp_max(89)
    member = torch.from_numpy(kinds == kind)
    truth = torch.where(member, logits, -math.inf).double().softmax(0)
    truth = torch.zeros(90, dtype=torch.float64).index_add_(0, bins, truth)
    assert follows(bins[drawn], truth)
