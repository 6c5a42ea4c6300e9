"""The kernels over logits in memory against their references, and the noise inside of kernels."""

from __future__ import annotations

import pytest
import torch

from tests.support.ops.interpreter import interpreted
from tests.support.ops.triton_statistics import (
    DEVICE,
    DTYPES,
    ROW_TILE,
    TILE,
    Product,
    check,
    decided,
    draws,
    random,
    rows_triton,
    unread,
)
from vllm_dllm.ops.noise import keyed
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import row_statistics
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX, draw

noise_kernels = interpreted("tests.support.ops.draw_noise_triton")
pytestmark = pytest.mark.usefixtures("garbage_before_kernels")


def test_noise_is_that_of_the_reference() -> None:
    """Uniform numbers bit for bit; Gumbel noise within the error that `gumbel` states."""
    keys = row_keys(torch.arange(6, device=DEVICE), 5)
    out = torch.full((2, 6, 4096), torch.nan, device=DEVICE)
    for first in (0, FIRST_GROUP_INDEX + 12_345):
        noise_kernels.noise_kernel[(6,)](keys, first, out, COUNT=4096)
        index = torch.arange(first, first + 4096, device=DEVICE)
        u = keyed.uniform(keys, index)
        assert torch.equal(out[0], u)
        exact = -(-torch.log1p(-u.double())).log()
        assert ((out[1] - exact).abs() <= 1e-6 + 2e-7 * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 7), (31, 300), (33, 1000), (63, 64), (129, 2049)]
)
def test_rows_of_logits(dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    """Rows that lie apart, from an odd address on, between columns that must not be read."""
    wide = torch.full((rows, vocabulary + 9), torch.nan, dtype=dtype, device=DEVICE)
    logits = wide[:, 3 : vocabulary + 3]
    logits.copy_(random(rows, vocabulary) * 5)
    logits[0, vocabulary // 2 :] = -torch.inf
    before = logits.clone()
    check_rows(logits, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_forbidden_id_counts_but_is_not_chosen(dtype: torch.dtype) -> None:
    rows, vocabulary, forbidden = 33, 700, 300
    logits = (random(rows, vocabulary) * 4).to(dtype)
    logits[:9, forbidden] = 90.0  # by far the largest
    logits[9, forbidden] = -torch.inf
    logits[10, ::2] = -torch.inf
    logits[11] = 2.0  # all tied
    logits[12, 1:] = -torch.inf
    check_rows(logits, forbidden)


def check_rows(logits: torch.Tensor, forbidden: int | None) -> None:
    """Statistics of logits in memory against the reference."""
    found = rows_triton.logits_statistics(logits, forbidden, tile=ROW_TILE)
    got = found.greedy_statistics(entropy=True)
    # A column that is never chosen and weighs nothing stands in for no forbidden id.
    nothing = torch.full_like(logits[:, :1], -torch.inf)
    with_it = torch.cat([logits, nothing], 1)
    column = logits.shape[1] if forbidden is None else forbidden
    want = row_statistics(with_it, column, entropy=True)
    assert torch.equal(got.token, want.token)
    assert torch.equal(found.sample, want.token)
    p = logits.double().softmax(-1)
    check("probability", got.probability, p.gather(1, want.token[:, None])[:, 0], want.probability)
    check("entropy", got.entropy, -torch.xlogy(p, p).sum(-1), want.entropy)


def test_a_draw_is_from_the_allowed_ids() -> None:
    """Its probability is among all ids, the forbidden one included."""
    case, forbidden = Product.make((33, 700, 32), torch.bfloat16), 300
    temperature, keys = draws(33)
    found = rows_triton.head_statistics(
        case.hidden, case.head, temperature, keys, forbidden, tile=TILE
    )
    got = found.sampled_statistics(temperature == 0)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    p, rough = (case.exact / divisor.double()).softmax(-1), (case.eager / divisor).softmax(-1)
    scaled = case.eager / divisor
    scaled[:, forbidden] = -torch.inf
    sure = decided(scaled, keys) & (temperature > 0)
    assert torch.equal(got.sample[sure], draw(scaled, keys)[sure])
    assert (got.sample != forbidden).all()
    exact, eager = (t.gather(1, got.sample[:, None])[:, 0] for t in (p, rough))
    check("sample", got.sample_probability[sure], exact[sure], eager[sure])


def test_a_draw_from_logits_in_memory() -> None:
    """The ids of the plain reference, from rows in which some ids are excluded."""
    rows, vocabulary, forbidden = 65, 700, 300
    logits = random(rows, vocabulary) * 3
    logits[:9, 64:128] = -torch.inf
    logits[9, 1:] = -torch.inf
    temperature, keys = draws(rows)
    found = rows_triton.logits_statistics(logits, forbidden, temperature, keys, tile=ROW_TILE)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    scaled[:, forbidden] = -torch.inf
    sure = decided(scaled, keys)
    assert sure.float().mean() > 0.9
    assert torch.equal(found.sample[sure], draw(scaled, keys)[sure])
    weight = (scaled.gather(1, found.sample[:, None])[:, 0] - scaled.amax(-1)).double().exp()
    check("weight", (found.scaled - found.best).exp(), weight, weight.float())


def test_ties_go_to_the_lowest_id() -> None:
    """Across groups, tiles and splits, and in the head as in logits."""
    for first in (0, 5, 64, 255, 256, 900):
        logits = torch.zeros(3, 1000, device=DEVICE)
        logits[:, first::7] = 3.0
        assert rows_triton.logits_statistics(logits, tile=ROW_TILE).token.tolist() == [first] * 3
        hidden = torch.ones(3, 16, device=DEVICE)
        head = Head(unread, 1000, weight=logits[:1].T.repeat(1, 16).contiguous())
        assert rows_triton.head_statistics(hidden, head, tile=TILE).token.tolist() == [first] * 3
