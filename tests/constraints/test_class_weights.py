"""From logits to weights of classes, against one class after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_dllm.constraints.decoding import class_weights as reduction
from vllm_dllm.constraints.decoding.class_weights import (
    TokenChunks,
    class_logsumexp,
    class_maxima,
    draw_in_class,
)
from vllm_dllm.ops.noise.keyed import row_keys

IDS, CLASSES, ROWS = 1000, 9, 7


def classes_of(seed: int) -> torch.Tensor:
    """Some large, some of one token, one without any, and tokens of no class."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(
        CLASSES + 1, size=IDS, p=[0.4, 0.3, 0.1, 0.05, 0.01, 0.01, 0, 0.01, 0.02, 0.1]
    )
    kinds[kinds == 7] = CLASSES
    kinds[500] = 7
    return torch.from_numpy(kinds)


def logits_of(seed: int, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(ROWS, IDS, generator=torch.Generator().manual_seed(seed)) * 4
    return logits.round() if ties else logits


@pytest.fixture(params=[False, True], ids=["rows together", "row by row"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(reduction, "GATHERED_BYTES", 1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_and_the_sum_of_each_class(ties: bool, dtype: torch.dtype) -> None:
    kinds, logits = classes_of(0), logits_of(1, ties=ties).to(dtype)
    chunks = TokenChunks.of(kinds, CLASSES)
    weight, token = class_maxima(logits, chunks)
    total, _ = class_logsumexp(logits, chunks)
    for kind in range(CLASSES):
        ids = (kinds == kind).nonzero()[:, 0]
        if not len(ids):
            assert (weight[:, kind] == -math.inf).all() and (token[:, kind] == 0).all()
            assert (total[:, kind] == -math.inf).all()
            continue
        some = logits[:, ids].float()
        assert torch.equal(weight[:, kind], some.amax(1))
        assert torch.equal(token[:, kind], ids[some.argmax(1)]), "ties go to the lowest id"
        torch.testing.assert_close(total[:, kind], some.logsumexp(1), atol=1e-5, rtol=1e-6)


def test_excluded_tokens() -> None:
    """A class of -inf alone is no error: it weighs nothing, and its lowest token stands for it."""
    kinds = torch.tensor([0, 0, 1, 1, 2])
    logits = torch.tensor([[1.0, -math.inf, -math.inf, -math.inf, 5.0]])
    chunks = TokenChunks.of(kinds, 2)
    weight, token = class_maxima(logits, chunks)
    assert weight.tolist() == [[1.0, -math.inf]]
    assert token.tolist() == [[0, 2]]
    assert class_logsumexp(logits, chunks)[0].tolist() == [[1.0, -math.inf]]
    keys = row_keys(torch.arange(64))
    many = logits.expand(64, -1)
    _, by_chunk = class_logsumexp(many, chunks)
    drawn = draw_in_class(many, chunks, by_chunk, torch.ones(64, dtype=torch.int64), keys)
    assert set(drawn.tolist()) == {2, 3}


def test_drawn_tokens_follow_the_softmax_of_their_class() -> None:
    """Of a class of several chunks, and of one that no chunk is full of."""
    count = 40_000
    kinds = torch.arange(200) % 3 % 2
    logits = torch.randn(200, generator=torch.Generator().manual_seed(5))
    chunks = TokenChunks.of(kinds, 2)
    many = logits.expand(count, -1)
    keys = row_keys(torch.arange(count))
    _, by_chunk = class_logsumexp(logits[None], chunks)
    for kind in (0, 1):
        asked = torch.full((count,), kind)
        drawn = draw_in_class(many, chunks, by_chunk.expand(count, -1), asked, keys)
        seen = torch.bincount(drawn, minlength=200) / count
        truth = torch.where(kinds == kind, logits, -math.inf).softmax(0)
        deviation = (truth * (1 - truth) / count).sqrt()
        assert ((seen - truth).abs() <= 5 * deviation).all()


def test_nothing_in_any_class() -> None:
    chunks = TokenChunks.of(torch.full((5,), 3), 3)
    weight, token = class_maxima(torch.randn(2, 5), chunks)
    assert weight.tolist() == [[-math.inf] * 3] * 2
    assert token.tolist() == [[0] * 3] * 2
    assert class_logsumexp(torch.randn(2, 5), chunks)[0].tolist() == [[-math.inf] * 3] * 2
