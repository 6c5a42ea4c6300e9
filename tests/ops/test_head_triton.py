"""The kernels over tiles of the head, and the soft embedding, against their references."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.support.ops.ranks import ThreadCollectives
from tests.support.ops.triton_statistics import (
    DEVICE,
    TILE,
    Product,
    check,
    check_all,
    draws,
    rows_triton,
    soft_embedding,
)
from vllm_dllm.ops.statistics.groups import GROUP
from vllm_dllm.ops.statistics.head import Shard
from vllm_dllm.ops.statistics.rows import RowStatistics, SampledStatistics, row_statistics

pytestmark = pytest.mark.usefixtures("garbage_before_kernels")


@pytest.mark.parametrize(
    ("dtype", "sizes", "cap"),
    [
        (torch.float32, (1, 7, 16), None),
        (torch.float32, (33, 1000, 40), 8.0),
        (torch.float32, (63, 257, 32), None),
        (torch.bfloat16, (1, 300, 64), 8.0),
        (torch.bfloat16, (31, 100, 48), None),
        (torch.bfloat16, (129, 1000, 64), 30.0),
        (torch.float16, (33, 449, 40), 8.0),
    ],
)
def test_heads_and_soft_embeddings(
    dtype: torch.dtype, sizes: tuple[int, int, int], cap: float | None, launches: list[str]
) -> None:
    case = Product.make(sizes, dtype, cap)
    temperature, keys = draws(sizes[0])
    got, soft = soft_embedding.fused_statistics(case.hidden, case.head, temperature, keys, 1 << 15)
    assert {"rows_kernel", "merge_kernel", "weights_kernel", "sum_kernel"} == set(launches)
    check_all(got, case.exact, case.eager, temperature, keys, cap)
    greedy = (temperature == 0)[:, None]
    embedding = case.head.embedding
    divisor = torch.where(greedy, 1.0, temperature[:, None])
    p = (case.exact / divisor.double()).softmax(-1)
    # In eager low precision the probabilities are rounded to the embedding's dtype, too.
    eager = (case.eager / divisor).softmax(-1).to(dtype).float() @ embedding.float()
    certain = embedding[got.token]
    exact = torch.where(greedy, certain.double(), p @ embedding.double())
    check("soft", soft, exact, torch.where(greedy, certain.float(), eager))
    assert torch.equal(soft[::5], certain.float()[::5])


def test_only_what_is_wanted_is_computed(launches: list[str]) -> None:
    """No embedding, no second pass; no keys, the argmax is the sample."""
    case = Product.make((5, 200, 16))
    temperature, keys = draws(5)
    head = replace(case.head, embedding=None)
    assert soft_embedding.fused_statistics(case.hidden, head, temperature, keys, 1)[1] is None
    assert launches == ["rows_kernel", "merge_kernel"]
    found = rows_triton.head_statistics(case.hidden, head, forbidden=3, tile=TILE)
    assert torch.equal(found.sample, found.token)
    want = row_statistics(case.eager.clone(), 3, entropy=True)
    got = found.greedy_statistics(entropy=True)
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.probability, want.probability, atol=4e-6, rtol=0)
    torch.testing.assert_close(got.entropy, want.entropy, atol=4e-6, rtol=0)


def test_a_head_that_kernels_cannot_read_is_refused() -> None:
    case = Product.make((2, 70, 16))
    temperature, keys = draws(2)

    def refused(match: str, hidden: torch.Tensor, **changes: object) -> None:
        with pytest.raises(ValueError, match=match):
            soft_embedding.fused_statistics(
                hidden, replace(case.head, **changes), temperature, keys, 1
            )

    refused("no weight", case.hidden, weight=None)
    refused("bfloat16 of width 16", case.hidden.bfloat16())
    refused("of width 8", case.hidden[:, :8].contiguous())
    refused("contiguous rows", case.hidden, weight=case.head.weight.T.contiguous().T)
    refused("contiguous rows", case.hidden, embedding=case.head.embedding.T.contiguous().T)
    with pytest.raises(ValueError, match="contiguous along the vocabulary"):
        rows_triton.logits_statistics(torch.zeros(9, 4, device=DEVICE).T)


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10, 500])
def test_ranks_find_what_one_finds(vocabulary: int) -> None:
    """Shards of whole groups draw the same; with 40 ids the second rank has padding alone."""
    case, ranks = Product.make((9, vocabulary, 32)), 2
    temperature, keys = draws(9)
    width = GROUP * -(-vocabulary // (GROUP * ranks))
    everyone = ThreadCollectives(ranks)

    def rank(n: int) -> tuple[SampledStatistics, torch.Tensor]:
        first, end = n * width, min((n + 1) * width, vocabulary)
        # A rank's weight has rows of padding behind its ids.
        own = torch.full((width, 32), torch.nan, device=DEVICE)
        own[: max(0, end - first)] = case.head.weight[first:end]
        shard = Shard(first, end, width, everyone.gather, everyone.sum)
        embedding = case.head.embedding[first:end]
        head = replace(case.head, weight=own, embedding=embedding, shard=shard)
        return soft_embedding.fused_statistics(case.hidden, head, temperature, keys, 1 << 16)

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    want, soft = soft_embedding.fused_statistics(case.hidden, case.head, temperature, keys, 1 << 16)
    for got, got_soft in results:
        assert torch.equal(got.token, want.token)
        assert torch.equal(got.sample, want.sample)
        check_all(got, case.exact, case.eager, temperature, keys)
        torch.testing.assert_close(got_soft, soft, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("forbidden", [3, 130])
def test_the_forbidden_id_of_one_rank(forbidden: int) -> None:
    """It counts on the rank that has it; the other has such an id in its padding at most."""
    case, width = Product.make((9, 200, 32)), 128
    everyone = ThreadCollectives(2)

    def rank(n: int) -> RowStatistics:
        shard = Shard(n * width, min((n + 1) * width, 200), width, everyone.gather, everyone.sum)
        weight = case.head.weight[shard.first : shard.end]
        head = replace(case.head, weight=weight, shard=shard)
        found = rows_triton.head_statistics(case.hidden, head, forbidden=forbidden, tile=TILE)
        return found.merge_ranks(shard).greedy_statistics(entropy=True)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rank, range(2)))
    want = row_statistics(case.eager.clone(), forbidden, entropy=True)
    for got in results:
        assert torch.equal(got.token, want.token)
        torch.testing.assert_close(got.probability, want.probability, atol=4e-6, rtol=0)
        torch.testing.assert_close(got.entropy, want.entropy, atol=4e-6, rtol=0)


@pytest.mark.parametrize("budget", [1, 40_000, 1 << 20])
def test_the_workspace_keeps_to_its_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several parts of a sum, and with weights of which float16 has no probabilities."""
    case = Product.make((20, 1000, 16), torch.float16)
    even = replace(case.head, weight=torch.zeros_like(case.head.weight))
    temperature, keys = torch.ones(20, device=DEVICE), draws(20)[1]
    taken: list[int] = []
    poisoned = soft_embedding.empty

    def watched(*args: object) -> torch.Tensor:
        found = poisoned(*args)
        taken.append(found.nbytes)
        return found

    monkeypatch.setattr(soft_embedding, "empty", watched)
    found = rows_triton.head_statistics(case.hidden, even, temperature, keys)
    soft = soft_embedding.soft_embedding(case.hidden, even, temperature, found, budget)
    assert len(taken) == 1
    assert taken[0] <= max(budget, 20 * 128 * 2)
    exact = case.head.embedding.double().mean(0).expand(20, -1)
    # Weights of 1 are exact in any dtype; what is left is the sum of a thousand float32 numbers.
    torch.testing.assert_close(soft.double(), exact, atol=1e-6, rtol=1e-6)
