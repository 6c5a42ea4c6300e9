"""JointThreshold: decide masks and rewrite visible tokens in the same step (LLaDA2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import Algorithm, Canvas, StateTensor, StepContext, Update, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class JointThresholdConfig(AlgorithmConfig):
    """Settings of `JointThreshold`."""

    threshold: float = setting(0.5, "decide masked positions that are surer than this")
    edit_threshold: float = setting(0.0, "rewrite visible positions that are surer than this")
    max_post_edit_steps: int = setting(16, "steps that only edit, at most", whole=True, blocks=4)
    penalty_lambda: float = setting(0.0, "taken off the logit of the left neighbour's token")


class JointThreshold(Algorithm):
    """Mask-to-token and token-to-token editing from one forward pass.

    With M the masked positions, V the visible ones that are not fixed, x the argmax and p its
    probability, both after `penalty_lambda` was subtracted from the logit of the token to the left
    inside the canvas::

        decide  {i in M : p_i > threshold}   or, when that is empty,   {argmax over M of p_i}
        rewrite {i in V : x_i differs from the token there and p_i > edit_threshold}

    A step that starts without masks counts against `max_post_edit_steps`. The canvas is done
    when a step would change nothing, or when the count exceeds the budget (that step's changes
    are then dropped). In both cases the forward pass has read the final canvas, so it is the
    commit.

    Presets: ``JointThreshold-S`` (speed: 0.5 / 0) and ``JointThreshold-Q`` (quality: 0.7 / 0.5).

    Source: LLaDA2.1 (arXiv 2602.08676) and SGLang's class of the same name.
    """

    name: str = "JointThreshold"
    config: type[AlgorithmConfig] = JointThresholdConfig
    presets: Mapping[str, Mapping[str, float]] = MappingProxyType(
        {
            "S": {"threshold": 0.5, "edit_threshold": 0.0, "max_post_edit_steps": 16},
            "Q": {"threshold": 0.7, "edit_threshold": 0.5, "max_post_edit_steps": 16},
        }
    )
    state: Mapping[str, StateTensor] = MappingProxyType(
        {"post_edit_steps": StateTensor(torch.int32, initial=0, per_position=False)}
    )
    edits: bool = True

    def cap(self, length: int, settings: AlgorithmConfig) -> int:
        """See `Algorithm.cap`: a step per mask, all editing steps, and one that changes nothing."""
        return length + int(settings.values()["max_post_edit_steps"]) + 1

    def adjust(
        self, canvas: Canvas, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Algorithm.adjust`: penalise the left neighbour's token, if there is one."""
        amount = -parameters["penalty_lambda"][:, None].expand_as(canvas.tokens).clone()
        amount[:, 0] = 0
        return canvas.tokens.roll(1, dims=1), amount

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        parameters, statistics = context.parameters, context.statistics
        complete = ~canvas.masked.any(1)  # [slots], before this step
        spent = context.state["post_edit_steps"] + complete
        over = complete & (spent > parameters["max_post_edit_steps"])

        sure = statistics.probability > parameters["threshold"][:, None]
        filled = reveal(canvas, context, sure).canvas
        visible = ~canvas.masked & ~canvas.fixed
        edit = visible & (statistics.token != canvas.tokens)
        edit = edit & (statistics.probability > parameters["edit_threshold"][:, None])
        tokens = torch.where(edit, statistics.token, filled.tokens)
        tokens = torch.where(over[:, None], canvas.tokens, tokens)
        # A canvas with masks always changes, because at least one mask is decided.
        unchanged = complete & ~edit.any(1)
        return Update(
            Canvas(tokens, filled.masked, canvas.fixed),
            unchanged | over | context.last,
            {"post_edit_steps": spent.int()},
        )
