"""The alternatives to the row-statistics kernels, as functions to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.ops.row_stats_batch import TILE_BYTES, Batch, capped
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import row_statistics
from vllm_dllm.ops.statistics.rows_triton import measured_statistics
from vllm_dllm.ops.statistics.sampled import draw
from vllm_dllm.ops.statistics.tiled import tiled_statistics


def whole_rows(
    hidden: torch.Tensor, head: Head, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same results from whole rows of logits, in plain torch operators."""
    logits = (hidden @ head.weight.T).float()
    if head.embedding is None:
        statistics = row_statistics(logits, 0, entropy=True)
        return statistics.token, statistics.probability, statistics.entropy
    greedy = (temperature == 0)[:, None]
    scaled = capped(logits, head.soft_cap) / torch.where(greedy, 1.0, temperature[:, None])
    token = scaled.argmax(-1)
    p = scaled.softmax(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    sample = torch.where(greedy[:, 0], token, draw(scaled, keys))
    picked = p.gather(1, torch.stack([token, sample], 1))
    soft = p.to(head.embedding.dtype) @ head.embedding
    return token, sample, picked, entropy, torch.where(greedy, head.embedding[token], soft)


def others(batch: Batch) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The alternatives by name; the last two are only parts of the work."""
    arguments = batch.hidden, batch.head, batch.temperature, batch.keys
    yield "eager", lambda: whole_rows(*arguments)
    compiled = torch.compile(whole_rows, dynamic=False)
    yield "compiled", lambda: compiled(*arguments)
    yield "tiled", lambda: tiled_statistics(*arguments, TILE_BYTES)
    weight = batch.head.weight
    if not batch.shape.soft:
        yield "product, rows", lambda: measured_statistics(batch.hidden @ weight.T, forbidden=0)
    yield "product alone", lambda: batch.hidden @ weight.T
