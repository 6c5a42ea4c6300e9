"""From logits to weights and tokens of classes, against one class after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from canvas_grammar.automaton.windows import NO_CLASS
from canvas_grammar.decoding import canvas_logits
from canvas_grammar.decoding import class_weights as reduction
from canvas_grammar.decoding.canvas_logits import CanvasLogits, FreeTokens, draw_rows
from canvas_grammar.decoding.class_reduction import ClassWeights
from canvas_grammar.decoding.class_tokens import best_in_class, draw_in_class
from canvas_grammar.decoding.class_weights import (
    class_logsumexp,
    class_maxima,
    class_maxima_and_logsumexp,
)
from canvas_grammar.decoding.noise import row_keys
from canvas_grammar.decoding.token_classes import CHUNK, BatchClasses, TokenClasses

IDS, LENGTH = 6000, 7


def classes_of(seed: int, classes: int = 9) -> np.ndarray:
    """Some large, some of one token, one without any, and tokens of no class."""
    rng = np.random.default_rng(seed)
    share = np.array([0.75, 0.1, 0.03, 0.05, 0.001, 0.001, 0, 0.01, 0.01])[:classes]
    kinds = rng.choice([*range(classes), NO_CLASS], size=IDS, p=[*share, 1 - share.sum()])
    kinds[kinds == 7] = NO_CLASS
    kinds[500] = classes - 2
    return kinds


def logits_of(seed: int, canvases: int = 2, *, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(canvases, LENGTH, IDS, generator=generator) * 4
    return logits.round() if ties else logits


KINDS = [classes_of(0), classes_of(1, 5)]


def batch() -> BatchClasses:
    """Two canvases with different classes."""
    return BatchClasses.join(
        [
            TokenClasses.from_class_of_token(KINDS[0], 9),
            TokenClasses.from_class_of_token(KINDS[1], 5),
        ]
    )


def maxima(logits: CanvasLogits, classes: BatchClasses, wanted: torch.Tensor) -> ClassWeights:
    return class_maxima(logits, classes, wanted, best_of(logits))


def sums(logits: CanvasLogits, classes: BatchClasses, wanted: torch.Tensor) -> ClassWeights:
    return class_logsumexp(logits, classes, wanted, drawn_of(logits))


def best_of(logits: CanvasLogits) -> FreeTokens:
    return logits.best(logits.logits[logits.index].argmax(-1))


def drawn_of(logits: CanvasLogits) -> FreeTokens:
    canvases, length = len(logits.index), logits.logits.shape[1]
    keys = row_keys(logits.index[:, None], torch.arange(length))
    return logits.drawn(torch.ones(canvases, length, dtype=torch.bool), keys)


EVERYWHERE = torch.ones(2, LENGTH, dtype=torch.bool)


@pytest.fixture(params=["positions", "canvases"])
def as_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the way of a GPU, where all positions of some canvases are reduced together."""
    if request.param == "canvases":
        monkeypatch.setattr(reduction, "may_read", lambda wanted: False)
        monkeypatch.setattr(canvas_logits, "may_read", lambda wanted: False)


@pytest.mark.usefixtures("as_on")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_and_the_sum_of_each_class(ties: bool, dtype: torch.dtype) -> None:
    classes, whole = batch(), logits_of(1, ties=ties).to(dtype)
    logits = CanvasLogits.every(whole)
    largest = maxima(logits, classes, EVERYWHERE)
    total = sums(logits, classes, EVERYWHERE)
    for canvas, kinds in enumerate(KINDS):
        for kind in range(classes.classes + 1):
            ids = torch.from_numpy(np.flatnonzero(kinds == kind))
            weight = largest.by_class[canvas, :, kind], total.by_class[canvas, :, kind]
            if not len(ids):
                assert (torch.cat(weight) == -math.inf).all()
                continue
            some = whole[canvas][:, ids].float()
            assert torch.equal(weight[0], some.amax(1))
            torch.testing.assert_close(weight[1], some.logsumexp(1), atol=1e-5, rtol=1e-6)
            asked = torch.full((2, LENGTH), kind)
            token = best_in_class(logits, classes, largest.by_chunk, asked)[canvas]
            best = ids[some.argmax(1)]
            read = (token == best) | (best == whole[canvas].argmax(1))
            assert read.all(), "ties go to the lowest id; the token of a row is known without this"


def test_canvases_of_a_larger_batch_in_any_order() -> None:
    classes, whole = batch(), logits_of(4, 5)
    some = CanvasLogits(whole, torch.tensor([3, 0]), (3, 0))
    plain = CanvasLogits.every(whole[[3, 0]])
    for reduce, free in ((class_maxima, best_of(plain)), (class_logsumexp, drawn_of(plain))):
        one, two = (reduce(each, classes, EVERYWHERE, free) for each in (some, plain))
        assert torch.equal(one.by_class, two.by_class)
        assert torch.equal(one.by_chunk, two.by_chunk)
    token = torch.randint(IDS, (2, LENGTH, 3))
    assert torch.equal(some.pick(token), plain.pick(token))


def test_only_wanted_positions_are_reduced() -> None:
    """And company, of rows or of canvases, changes no bit."""
    classes, logits = batch(), CanvasLogits.every(logits_of(2))
    wanted = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    assert wanted.any() and not wanted.all()
    for reduce in (maxima, sums):
        every, some = (reduce(logits, classes, each) for each in (EVERYWHERE, wanted))
        assert torch.equal(every.by_class[wanted], some.by_class[wanted])
        assert (some.by_class[~wanted] == -math.inf).all()
        own = BatchClasses.join([TokenClasses.from_class_of_token(KINDS[1], 5)])
        alone = reduce(CanvasLogits(logits.logits, torch.tensor([1]), (1,)), own, wanted[1:])
        assert torch.equal(alone.by_class[0, :, :5], some.by_class[1, :, :5])


@pytest.mark.parametrize("reads", [True, False])
def test_tokens_and_sums_of_whole_rows(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are wanted, also where nobody may know which are, and in several parts."""
    monkeypatch.setattr(canvas_logits, "may_read", lambda wanted: reads)
    monkeypatch.setattr(canvas_logits, "GATHERED_BYTES_GPU", 1)
    whole = logits_of(2)
    wanted = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    keys = row_keys(torch.arange(2)[:, None], torch.arange(LENGTH))
    found = CanvasLogits(whole, torch.tensor([1, 0]), (1, 0)).drawn(wanted, keys)
    rows = whole.flip(0)
    torch.testing.assert_close(found.weight[wanted], rows.logsumexp(-1)[wanted])
    drawn = draw_rows(rows.flatten(0, 1), keys.flatten())[0].view(2, LENGTH)
    assert torch.equal(found.token[wanted], drawn[wanted])


def test_a_wide_class_is_read_only_where_its_weight_is_not_known() -> None:
    """Not where the token without a constraint is in it, unless other tokens weigh as much."""
    classes, whole = batch(), logits_of(7)
    wide = torch.from_numpy(KINDS[0] == 0)
    whole[0, 0, ~wide] += 30  # the free token is of another class
    whole[0, 1, wide] -= 8
    whole[0, 1, 5] = 12  # a token that is not
    logits = CanvasLogits.every(whole)
    free = best_of(logits), drawn_of(logits)
    free[1].token[0, 1] = int(wide.nonzero()[0])  # though it has a share of less than a half
    found = class_maxima(logits, classes, EVERYWHERE, free[0])
    total = class_logsumexp(logits, classes, EVERYWHERE, free[1])
    chunk = classes.first_chunk[0, 0]
    assert classes.wide.tolist() == [0, 0]
    assert classes.narrow_chunks[0] == chunk and classes.chunks[0] > 60 + chunk
    for weights, tokens in ((found, free[0].token), (total, free[1].token)):
        in_wide = wide[tokens[0]]
        assert in_wide.any()
        read = weights.by_chunk[0, :, chunk].isfinite()
        assert torch.equal(read[2:], ~in_wide[2:])
        assert read[:2].all()
    some = whole[0][:, wide]
    assert torch.equal(found.by_class[0, :, 0], some.amax(-1))
    exact = some.double().logsumexp(-1)
    error = (total.by_class[0, :, 0].double() - exact).abs()
    # The sums of a row and of its rest, each rounded, and their difference, which doubles it.
    assert (error <= 8 * torch.finfo(torch.float32).eps * exact.abs().clamp_min(1)).all()


def test_both_reductions_at_once() -> None:
    classes, whole = batch(), logits_of(3)
    temperature = torch.rand(2, LENGTH) + 0.2
    logits = CanvasLogits.every(whole)
    scaled = CanvasLogits.every(whole / temperature[..., None])
    free = best_of(logits), drawn_of(scaled)
    largest, total = class_maxima_and_logsumexp(logits, temperature, classes, EVERYWHERE, free)
    for one, two in (
        (largest, maxima(logits, classes, EVERYWHERE)),
        (total, sums(scaled, classes, EVERYWHERE)),
    ):
        torch.testing.assert_close(one.by_class, two.by_class)
        read = one.by_chunk.isfinite() & two.by_chunk.isfinite()
        assert torch.equal(one.by_chunk[read], two.by_chunk[read])
    keys = row_keys(torch.arange(2)[:, None], torch.arange(LENGTH))
    kind = torch.zeros(2, LENGTH, dtype=torch.int64)
    drawn = draw_in_class(logits, classes, total.by_chunk, kind, keys, temperature)
    assert torch.equal(drawn, draw_in_class(scaled, classes, total.by_chunk, kind, keys))


def test_extreme_logits() -> None:
    """A class keeps its weight however far it is below the rest of its row."""
    classes, whole = batch(), logits_of(5)
    whole[:, 0] -= 1e4
    whole[:, 1] = whole[:, 1] * 1e-3 + 300
    for canvas, kinds in enumerate(KINDS):
        whole[canvas, 2, torch.from_numpy(kinds == 0)] += 500
        whole[canvas, 3, torch.from_numpy(kinds == 0)] = 1e30
        whole[canvas, 4, torch.from_numpy(kinds == 1)] = -math.inf
        whole[canvas, 5, torch.from_numpy(kinds == 0)] = -1e30
    found = sums(CanvasLogits.every(whole), classes, EVERYWHERE)
    for canvas, kinds in enumerate(KINDS):
        for kind in range(4):
            ids = torch.from_numpy(np.flatnonzero(kinds == kind))
            expected = whole[canvas][:, ids].double().logsumexp(1).float()
            torch.testing.assert_close(
                found.by_class[canvas, :, kind], expected, atol=2e-5, rtol=1e-6
            )


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_that_are_none(wrong: float) -> None:
    """Such a request fails, but until then every token must be an id of its class."""
    classes, whole = batch(), logits_of(6)
    whole[:, :, ::7] = wrong
    whole[:, 0] = wrong
    logits = CanvasLogits.every(whole)
    keys = row_keys(torch.arange(2)[:, None], torch.arange(LENGTH))
    largest = maxima(logits, classes, EVERYWHERE)
    total = sums(logits, classes, EVERYWHERE)
    assert not largest.by_class.isnan().any() and not total.by_class.isnan().any()
    for kind in range(4):
        asked = torch.full((2, LENGTH), kind)
        for token in (
            best_in_class(logits, classes, largest.by_chunk, asked),
            draw_in_class(logits, classes, total.by_chunk, asked, keys),
        ):
            for canvas, kinds in enumerate(KINDS):
                assert (kinds[token[canvas].numpy()] == kind).all()


def test_excluded_tokens() -> None:
    """A class of -inf alone is no error: it weighs nothing, and its lowest token stands for it."""
    classes = BatchClasses.join(
        [TokenClasses.from_class_of_token(np.array([0, 0, 1, 1, NO_CLASS]), 2)]
    )
    row = torch.tensor([1.0, -math.inf, -math.inf, -math.inf, 5.0])
    logits = CanvasLogits.every(row.expand(1, 64, -1))
    wanted = torch.ones(1, 64, dtype=torch.bool)
    largest = maxima(logits, classes, wanted)
    assert largest.by_class[0, 0].tolist() == [1.0, -math.inf, -math.inf]
    tokens = [
        best_in_class(logits, classes, largest.by_chunk, torch.full((1, 64), kind))[0, 0].item()
        for kind in (0, 1)
    ]
    assert tokens == [0, 2]
    total = sums(logits, classes, wanted)
    assert total.by_class[0, 0].tolist() == [1.0, -math.inf, -math.inf]
    keys = row_keys(torch.arange(64))[None]
    drawn = draw_in_class(logits, classes, total.by_chunk, torch.full((1, 64), 1), keys)
    assert set(drawn[0].tolist()) == {2, 3}


def test_drawn_tokens_follow_the_softmax_of_their_class() -> None:
    """Of a class of several ranges of chunks, and of one that no chunk is full of.

    Tokens are counted in bins. A right implementation fails each of the few hundred comparisons
    with a probability below 1e-6.
    """
    count, ids = 20_000, 9000
    kinds = np.where(np.arange(ids) % 100 == 0, 1, 0)
    logits = torch.randn(ids, generator=torch.Generator().manual_seed(5))
    classes = BatchClasses.join([TokenClasses.from_class_of_token(kinds, 2)])
    assert classes.most_chunks > 2 * CHUNK
    many = CanvasLogits.every(logits.expand(1, count, -1))
    of_the_narrow = FreeTokens(torch.tensor([[0]]), logits.logsumexp(0)[None, None])
    one = class_logsumexp(
        CanvasLogits.every(logits[None, None]), classes, torch.tensor([[True]]), of_the_narrow
    )
    keys = row_keys(torch.arange(count))[None]
    bins = torch.arange(ids) // 100
    for kind in (0, 1):
        asked = torch.full((1, count), kind)
        by_chunk = one.by_chunk.expand(1, count, -1)
        drawn = draw_in_class(many, classes, by_chunk, asked, keys)[0]
        assert (kinds[drawn.numpy()] == kind).all()
        member = torch.from_numpy(kinds == kind)
        truth = torch.where(member, logits, -math.inf).double().softmax(0)
        truth = torch.zeros(90, dtype=torch.float64).index_add_(0, bins, truth)
        seen = torch.bincount(bins[drawn], minlength=90) / count
        deviation = (truth * (1 - truth) / count).sqrt()
        assert ((seen - truth).abs() <= 5 * deviation).all()


def test_nothing_in_any_class() -> None:
    classes = BatchClasses.join([TokenClasses.from_class_of_token(np.full(5, NO_CLASS), 3)])
    logits, wanted = CanvasLogits.every(torch.randn(1, 2, 5)), torch.ones(1, 2, dtype=torch.bool)
    for reduce in (maxima, sums):
        assert (reduce(logits, classes, wanted).by_class == -math.inf).all()
