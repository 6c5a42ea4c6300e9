"""LowConfidence: decide every masked position that the model is sure of, or the surest one."""

from __future__ import annotations

import torch

from vllm_dllm.decoding.base import Canvas, Greedy, StepContext, Update, register_algorithm


@register_algorithm
class LowConfidence(Greedy):
    """Threshold decoding, the default of LLaDA2 (and of SGLang's class of the same name).

    With M the masked positions, x the argmax and p its probability::

        accept = {i in M : p_i > threshold}   or, when that is empty,   {argmax over M of p_i}

    Ties go to the lowest position. Each step decides at least one position, so a canvas of
    L positions is finished after at most L steps. A threshold of 1 or more decides one
    position a step. Positions outside M never change.

    Source: LLaDA2.0 (``generate`` with ``threshold``, steps = block length).
    """

    name: str = "LowConfidence"
    parameters: tuple[str, ...] = ("threshold",)

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        probability = context.statistics.probability  # [slots, L]
        confidence = torch.where(canvas.masked, probability, -1.0)
        accept = confidence > context.parameters["threshold"][:, None]
        surest = torch.zeros_like(accept).scatter_(1, confidence.argmax(1, keepdim=True), True)
        accept = torch.where(accept.any(1, keepdim=True), accept, surest)
        accept = (accept | context.last[:, None]) & canvas.masked
        masked = canvas.masked & ~accept
        tokens = torch.where(accept, context.statistics.token, canvas.tokens)
        return Update(Canvas(tokens, masked, canvas.fixed), done=~masked.any(1))
