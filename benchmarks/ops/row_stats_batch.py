"""Heads and batches of the row-statistics benchmark, with random numbers in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.head_triton import HeadTile, head_statistics
from vllm_dllm.ops.statistics.launch_triton import MeasuredStatistics, measured
from vllm_dllm.ops.statistics.soft_embedding_triton import fused_statistics

# The engine's own value (`worker/readout/contract.py`).
TILE_BYTES = 1 << 30  # as in the engine on a GPU


@dataclass(frozen=True)
class Shape:
    """A model's head and a batch of equal requests.

    Attributes:
        model: as printed.
        hidden, vocabulary, canvas: of the model.
        requests: of the batch.
        soft: whether its rows are sampled and have a soft embedding; else they are greedy, and
            id 0 is the mask, which is never chosen.
        cap: the final soft cap, or None.
    """

    model: str
    hidden: int
    vocabulary: int
    canvas: int
    requests: int
    soft: bool = False
    cap: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.requests:2} requests"

    @property
    def rows(self) -> int:
        return self.canvas * self.requests

    @property
    def flops(self) -> int:
        """Of the matrix products: one with the head, and two more for the soft embedding."""
        return 2 * self.rows * self.vocabulary * self.hidden * (3 if self.soft else 1)

    def bytes(self, size: int) -> int:
        """The least that must be read: each weight once for each product."""
        return self.vocabulary * self.hidden * size * (3 if self.soft else 1)


def shapes(quick: bool) -> Iterator[Shape]:
    """Of LLaDA2.0-mini and DiffusionGemma, or tiny ones."""
    if quick:
        yield Shape("tiny masked", 48, 1000, 8, 3)
        yield Shape("tiny uniform", 64, 777, 16, 2, soft=True, cap=30.0)
        return
    for requests in (1, 16, 64):
        yield Shape("llada2-mini", 2048, 157_184, 32, requests)
    for requests in (1, 4, 16):
        yield Shape("gemma", 2816, 262_144, 256, requests, soft=True, cap=30.0)


@dataclass(frozen=True)
class Batch:
    """Random hidden states of a shape, its head, temperatures and keys."""

    shape: Shape
    hidden: torch.Tensor
    head: Head
    temperature: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, device: torch.device) -> Batch:
        # The interpreter multiplies bfloat16 as if it were integers.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        random = partial(torch.randn, device=device, dtype=dtype)
        hidden = random(shape.rows, shape.hidden)
        # Logits that spread by 5: a few dozens of tokens have most of the mass.
        weight = random(shape.vocabulary, shape.hidden) * (5 / shape.hidden**0.5)
        embedding = random(shape.vocabulary, shape.hidden) if shape.soft else None
        temperature = torch.full((shape.rows,), 0.6, device=device)
        temperature[::7] = 0
        keys = row_keys(torch.arange(shape.rows, device=device), 1)

        def logits(hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
            return capped((hidden @ weight[first:end].T).float(), shape.cap)

        head = Head(logits, shape.vocabulary, embedding, None, weight, shape.cap)
        return cls(shape, hidden, head, temperature, keys)

    def ours(self) -> tuple[MeasuredStatistics, torch.Tensor | None]:
        """The statistics as the engine would compute them."""
        if self.shape.soft:
            return fused_statistics(self.hidden, self.head, self.temperature, self.keys, TILE_BYTES)
        return self.first_pass(), None

    def first_pass(self, tile: HeadTile | None = None) -> MeasuredStatistics:
        """Statistics without the soft embedding."""
        if self.shape.soft:
            partials = head_statistics(
                self.hidden, self.head, self.temperature, self.keys, tile=tile
            )
            return measured(partials, self.temperature == 0)
        partials = head_statistics(self.hidden, self.head, forbidden=0, tile=tile)
        return measured(partials, torch.zeros((), dtype=torch.bool, device=self.hidden.device))


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else (logits / cap).tanh() * cap
