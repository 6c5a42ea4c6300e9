"""Readout of a masked model whose head is spread over ranks, which exchange statistics."""

from __future__ import annotations

import torch

from vllm_dllm.engine.readout.contract import (
    HEAD_BYTES,
    Readings,
    ReadRequest,
    batch_extremes,
    tile_budget,
)
from vllm_dllm.engine.readout.dense import TilesReadout
from vllm_dllm.ops.statistics.rows import (
    RowStatistics,
    SampledStatistics,
    drawn_logprob,
    with_drawn,
)
from vllm_dllm.ops.statistics.sharded import sharded_statistics, without
from vllm_dllm.ops.statistics.tiled import example_budgets, tiled_statistics


class ShardedReadout(TilesReadout):
    """See `Readout`. Ranks exchange logits only for requests that need whole rows of them."""

    def _likeliest(self, hidden: torch.Tensor, entropy: bool) -> RowStatistics:
        """Statistics ``[rows]`` of the likeliest tokens."""
        return sharded_statistics(
            hidden, self.tiles, self.mask_token, entropy, HEAD_BYTES, self.compile
        )

    def _drawn(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """Readings with drawn tokens.

        They take a second pass over the head, which costs less than to exchange logits.
        """
        greedy = self._likeliest(hidden, request.entropy)
        temperature = request.temperature.repeat_interleave(self.slots.length)
        keys, budget = self.keys_of(request.slots), tile_budget(self.slots.device)
        sampled = self._sampled(hidden, temperature, keys, budget)
        weight = sampled.sample_probability / sampled.probability
        length = self.slots.length
        own_at = request.own_at_rows(length)
        statistics = with_drawn(greedy, weight, temperature > 0, sampled.sample, own_at)
        logprob = None
        if request.logprob:
            logprob = drawn_logprob(greedy, weight, temperature).view(-1, length)
        return Readings(statistics.view(-1, length), logprob=logprob)

    def _sampled(
        self, hidden: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, budget: int
    ) -> SampledStatistics:
        head = without(self.tiles, self.mask_token)
        return tiled_statistics(hidden, head, temperature, keys, budget, self.compile)[0]

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        super().warm_up(hidden)
        rows, device = len(hidden), hidden.device
        self._likeliest(hidden, entropy=False)
        temperature, keys = torch.ones(rows, device=device), torch.arange(rows, device=device)
        budgets = batch_extremes(self.slots), self.tiles, tile_budget(self.slots.device)
        for budget in example_budgets(rows, *budgets):
            self._sampled(hidden, temperature, keys, budget)
