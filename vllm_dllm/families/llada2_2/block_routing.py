"""Block routing: the tokens of a block choose their experts out of a pool that they share.

For each layer and each block of L tokens of one sequence, with the router's logits z, its bias b,
and the block's tokens that this pass computes::

    r[t, e] = sigmoid(z[t, e])        s[t, e] = r[t, e] + b[e]
    pool    = the `capacity` experts e with the largest max over t of s[t, e]
    chosen  = for each token, the `top_k` experts of the pool with the largest s[t, e]
    weight  = scale * r[t, e] / (sum of r over the chosen experts + 1e-20)

Ties go to the lower expert. Prompt tokens, decided tokens and masks count alike. A prompt's last
block may be partial; padding rows of a CUDA graph belong to no block.

Source: LLaDA2.2's technical report (inclusionAI/LLaDA2.X), and SGLang (PR 31768).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter


class BlockRows:
    """Which rows of a step form a block, for all layers; computed before each forward pass.

    Attributes:
        block: int64 ``[rows]``, a number for each row, at most its place; equal for the rows of a
            block. The tensor persists, because CUDA graphs read it.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.length = length
        self.place = torch.arange(rows)
        self.block = self.place.clone()

    def find(self, positions: torch.Tensor, padded: int) -> None:
        """Number the blocks of a step, each of which begins at a multiple of L.

        `positions` in the rows' sequences are int64 ``[rows]``. Each row of padding, up to
        `padded` rows, is a block of its own.
        """
        rows = len(positions)
        begins = positions % self.length == 0
        self.block[:rows] = (begins.cumsum(0) - 1).clamp_min(0)
        self.block[rows:padded] = self.place[rows:padded]


class BlockRouter(BaseRouter):
    """Replaces the router of `experts`, vLLM's ``MoERunner``; the arguments are explained above."""

    def __init__(
        self, experts: Any, bias: torch.Tensor, rows: BlockRows, capacity: int, scale: float
    ) -> None:
        old = experts.router
        super().__init__(old.top_k, old.global_num_experts, old.eplb_state)
        self.bias, self.rows, self.capacity, self.scale = bias, rows, capacity, scale

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """See vLLM's class."""
        return RoutingMethodType.Custom

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        block = self.rows.block[: router_logits.shape[0]]
        weights, chosen = block_routing(
            router_logits, self.bias, block, self.capacity, self.top_k, self.scale
        )
        # vLLM's kernel for the CPU ignores strides.
        return weights.contiguous(), chosen.to(indices_type or torch.int32).contiguous()


def block_routing(
    logits: torch.Tensor,
    bias: torch.Tensor,
    block: torch.Tensor,
    capacity: int,
    top_k: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights (float32) and the experts (int64) of each row, ``[rows, top_k]``.

    `logits` are ``[rows, experts]``, `bias` is float32 ``[experts]``, and `block` int64 ``[rows]``,
    equal for the rows of a block and below the number of rows; the rest is explained above.
    """
    share = logits.float().sigmoid()
    score = share + bias
    # Of as many blocks as there are rows, because their number is on the device.
    best = torch.full_like(score, -torch.inf)
    best = best.scatter_reduce(0, block[:, None].expand_as(score), score, "amax")
    pool = torch.zeros_like(score, dtype=torch.bool).scatter(1, _largest(best, capacity), True)
    allowed = score.masked_fill(~pool.index_select(0, block), -torch.inf)
    chosen = _largest(allowed, top_k)
    weight = share.gather(1, chosen)
    return weight / (weight.sum(1, keepdim=True) + 1e-20) * scale, chosen


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest values of each row; ties go to the lower place."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
