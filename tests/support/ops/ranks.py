"""Threads that stand for the ranks of a model, for tests of a head that is spread over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from vllm_dllm.ops.statistics.head import Shard

Result = TypeVar("Result")


def on_ranks(
    ranks: int, vocabulary: int, width: int, rank: Callable[[Shard], Result]
) -> list[Result]:
    """What a function of a rank's shard, of `width` ids, returns on each of the ranks."""
    barrier = threading.Barrier(ranks, timeout=60)
    parts: dict[int, torch.Tensor] = {}

    def run(me: int) -> Result:
        def gather(part: torch.Tensor) -> torch.Tensor:
            barrier.wait()
            parts[me] = part
            barrier.wait()
            return torch.stack([parts[n] for n in range(ranks)])

        first, end = me * width, min((me + 1) * width, vocabulary)
        return rank(Shard(first, end, width, gather, lambda part: gather(part).sum(0)))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
