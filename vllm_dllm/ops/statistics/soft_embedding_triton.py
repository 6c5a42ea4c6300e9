"""The statistics of a model of uniform noise and its soft embedding, from rows of logits in memory.

The head is multiplied once, by PyTorch. Kernels read the logits (`rows_triton`), then each logit is
replaced in place by its weight, exp((score - origin) / T), and PyTorch multiplies the weights by
the embedding, in float32. The origin is the row's largest score, so that weights keep all their
bits; float16 probabilities would lose some. At the end the sum is divided by the row's sum of
weights.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows_triton import LOG2_E, inverse_temperature
from vllm_dllm.ops.statistics.sampled import product
from vllm_dllm.ops.statistics.scores_triton import LogitRows, empty, read_scores

IDS = 4096  # columns of a program


def soft_embedding(
    rows: LogitRows, head: Head, temperature: torch.Tensor, partials: SoftmaxPartials
) -> torch.Tensor:
    """``softmax(scores / temperature) @ embedding`` over the ids of all ranks, float32.

    Args:
        rows: the logits of all ids or of this rank's. They are overwritten with weights if they
            have the embedding's dtype.
        head: the head; only its `embedding`, ids and shard are read.
        temperature: float32 ``[rows]``. Rows at 0 are the embedding of their token.
        partials: the results of `logits_statistics` over these rows, merged over all ranks.
    """
    embedding, (count, ids) = head.embedding, rows.logits.shape
    assert embedding is not None
    is_whole = head.shard is not None and ids == head.vocabulary
    weights = rows.logits
    if weights.dtype != embedding.dtype:
        weights = empty((count, ids), embedding.dtype, weights.device)
    weights_kernel[count, triton.cdiv(ids, IDS)](
        *rows.arguments, temperature, partials.origin, partials.token, weights, weights.stride(0),
        ids, 0 if is_whole else head.ids.start, IDS=IDS,
    )  # fmt: skip
    own = weights[:, head.ids.start : head.ids.stop] if is_whole else weights
    total = torch.where(temperature == 0, 1.0, partials.sum)
    soft = product(own, embedding).div_(total[:, None])
    return soft if head.shard is None else head.shard.sum(soft)


@triton.jit(do_not_specialize=["count", "first_id"])
def weights_kernel(  # type: ignore[no-untyped-def]
    logits, stride, cap, added, changes, floor, length, temperature, origin, token,
    weights, weights_stride, count, first_id, IDS: tl.constexpr,
):  # fmt: skip
    """A tile of exp(score / T - origin); the grid is (rows, tiles of ids).

    Greedy rows have weight 1 at their token and 0 elsewhere. `token` is an id of the whole
    vocabulary, and the first column is that of `first_id`.
    """
    row = tl.program_id(0) + tl.arange(0, 1)
    local = (tl.program_id(1) * IDS + tl.arange(0, IDS))[None, :]
    x = read_scores(logits, stride, cap, added, changes, floor, length, row, local, count)
    inverse = inverse_temperature(temperature, row)
    distance = x * inverse[:, None] - tl.load(origin + row)[:, None]
    certain = local + first_id == tl.load(token + row)[:, None]
    is_greedy = (tl.load(temperature + row) == 0)[:, None]
    value = tl.where(is_greedy, tl.where(certain, 1.0, 0.0), tl.exp2(distance * LOG2_E))
    at = weights + row.to(tl.int64)[:, None] * weights_stride + local
    tl.store(at, value.to(weights.dtype.element_ty), mask=local < count)
