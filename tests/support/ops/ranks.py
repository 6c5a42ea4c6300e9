"""Collectives for tests in which threads stand for the ranks of a model."""

from __future__ import annotations

import threading

import torch


class ThreadCollectives:
    """Collectives between the threads of a pool, one for each rank.

    The workers of the pool must be as many as the ranks: worker n is rank n.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, self.barrier = ranks, threading.Barrier(ranks, timeout=60)
        self.parts: dict[int, torch.Tensor] = {}

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        me = int(threading.current_thread().name.rsplit("_", 1)[1])
        self.barrier.wait()
        self.parts[me] = part
        self.barrier.wait()
        return torch.stack([self.parts[n] for n in range(self.ranks)])

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return self.gather(part).sum(0)
