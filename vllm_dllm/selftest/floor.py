"""Measure the device: how many bytes it copies and matrix operations it performs per second.

A step takes at least its bytes divided by the first, and its operations divided by the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# The bytes of the copied tensor and the edge of the matrices, far beyond the caches, yet quick.
SIZES = {"cpu": (1 << 26, 1024), "cuda": (1 << 30, 8192)}
SHORT = (1 << 20, 64)
ROUNDS = 5


@dataclass(frozen=True)
class Device:
    """The measured abilities of a device.

    Attributes:
        bandwidth: bytes per second; a copy counts what it reads and what it writes.
        rate: operations per second of a matrix product; a multiply-add counts as two.
    """

    bandwidth: float
    rate: float

    def least(self, moved: float, operations: float) -> float:
        """The least seconds of a step that moves this many bytes and performs these operations."""
        return max(moved / self.bandwidth, operations / self.rate)


def measure(device: str, dtype: torch.dtype, *, short: bool = False) -> Device:
    """Measure a device and take the best of a few rounds.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: dtype of the matrices.
        short: use tiny sizes, whose figures mean nothing, for tests.
    """
    size, edge = SHORT if short else SIZES[device]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = _best(lambda: target.copy_(source), device)
    left = torch.ones(edge, edge, dtype=dtype, device=device)
    product = torch.empty_like(left)
    multiplied = _best(lambda: torch.mm(left, left, out=product), device)
    return Device(2.0 * size / copied, 2.0 * edge**3 / multiplied)


def _best(work: Callable[[], object], device: str) -> float:
    """Seconds of the quickest round."""
    times = []
    for _ in range(ROUNDS + 1):  # the first round warms up
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
