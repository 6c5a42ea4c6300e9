"""How the statistics of a masked model are computed: which kernels, and from what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters, candidate_keys
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import (
    RowStatistics,
    pure_row_statistics,
    row_statistics,
    with_drawn,
)
from vllm_dllm.ops.statistics.sampled import SampledStatistics, draw
from vllm_dllm.ops.statistics.sharded import Find, found_among, sharded_statistics, without
from vllm_dllm.ops.statistics.tiled import (
    Tiled,
    compiled_statistics,
    example_budgets,
    tiled_statistics,
)

# Bytes of float32 temporaries that a step may hold between hidden states and statistics.
HEAD_BYTES = 256 << 20
TILE_BYTES = 32 << 20


@dataclass(frozen=True)
class Draws:
    """What rows draw with: temperature float32 ``[rows]`` (0 is greedy), keys int64 ``[rows]``."""

    temperature: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class RowFunctions:
    """What is computed of rows of logits.

    Attributes:
        statistics: as `row_statistics`.
        keys: as `candidate_keys`.
        draw: as `draw`.
        found: of a rank's part of the rows, as `found_among`.
        tiled: of rows that exist a tile at a time, as `tiled_statistics`.
    """

    statistics: Callable[[torch.Tensor, int, bool], RowStatistics] = row_statistics
    keys: Callable[[Counters], torch.Tensor] = candidate_keys
    draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = draw
    found: Find = found_among
    tiled: Tiled = tiled_statistics

    @classmethod
    def compiled(cls) -> RowFunctions:
        """The same functions through PyTorch's compiler."""
        return cls(
            compiled(pure_row_statistics),
            compiled(candidate_keys),
            compiled(draw),
            compiled(found_among),
            compiled_statistics,
        )


class MaskedKernels(Protocol):
    """How the statistics of a masked model are computed."""

    functions: RowFunctions

    def rows(self, logits: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """As `row_statistics`."""
        ...

    def head(self, hidden: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics | None:
        """The same of hidden states ``[rows, hidden]``; None where only logits will do."""
        ...

    def drawn(
        self, hidden: torch.Tensor, forbidden: int, draws: Draws, entropy: bool
    ) -> RowStatistics | None:
        """The same with samples in place of the likeliest tokens, see `with_samples`."""
        ...

    def warm_up(self, hidden: torch.Tensor, forbidden: int, batches: Sequence[int]) -> None:
        """Call the functions that only these kernels use, on hidden states.

        `batches` are the rows of the smallest and of the largest batch. All ranks do so together.
        """
        ...


class OfLogits:
    """Kernels that draw from logits only."""

    def __init__(self, functions: RowFunctions) -> None:
        self.functions = functions

    def drawn(
        self, hidden: torch.Tensor, forbidden: int, draws: Draws, entropy: bool
    ) -> RowStatistics | None:
        """See `MaskedKernels`."""
        return None

    def warm_up(self, hidden: torch.Tensor, forbidden: int, batches: Sequence[int]) -> None:
        """See `MaskedKernels`: nothing."""


class PlainKernels(OfLogits):
    """PyTorch's operators, or what its compiler makes of them."""

    def rows(self, logits: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """See `MaskedKernels`."""
        return self.functions.statistics(logits, forbidden, entropy)

    def head(self, hidden: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics | None:
        """See `MaskedKernels`."""
        return None


class ShardKernels(PlainKernels):
    """The same for a head that is spread over ranks: statistics cross them instead of logits."""

    def __init__(self, functions: RowFunctions, head: Head) -> None:
        super().__init__(functions)
        self.tiles = head

    def head(self, hidden: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """See `MaskedKernels`."""
        find = self.functions.found
        return sharded_statistics(hidden, self.tiles, forbidden, entropy, HEAD_BYTES, find)

    def drawn(
        self, hidden: torch.Tensor, forbidden: int, draws: Draws, entropy: bool
    ) -> RowStatistics:
        """See `MaskedKernels`. A second pass over the head is less than its logits on the wire."""
        greedy = self.head(hidden, forbidden, entropy)
        found = self._sampled(hidden, forbidden, draws, TILE_BYTES)
        weight = found.sample_probability / found.probability
        return with_drawn(greedy, weight, draws.temperature > 0, found.sample)

    def _sampled(
        self, hidden: torch.Tensor, forbidden: int, draws: Draws, budget: int
    ) -> SampledStatistics:
        head = without(self.tiles, forbidden)
        return self.functions.tiled(hidden, head, draws.temperature, draws.keys, budget)[0]

    def warm_up(self, hidden: torch.Tensor, forbidden: int, batches: Sequence[int]) -> None:
        """See `MaskedKernels`."""
        rows, device = len(hidden), hidden.device
        self.head(hidden, forbidden, entropy=False)
        draws = Draws(torch.ones(rows, device=device), torch.arange(rows, device=device))
        for budget in example_budgets(rows, batches, self.tiles, TILE_BYTES):
            self._sampled(hidden, forbidden, draws, budget)
