"""A decoding algorithm with an error in it, which ends the engine that runs it."""

from __future__ import annotations

from vllm_dllm.decoding import Canvas, LowConfidence, StepContext, Update

BREAKS = 7.0  # the threshold at which it does


class Breaking(LowConfidence):
    """`LowConfidence`, until a request asks for that threshold."""

    name = "Breaking"

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        if bool((context.parameters["threshold"] == BREAKS).any()):
            raise ArithmeticError("the sum of all parts is\nless than the whole")
        return super().step(canvas, context)
