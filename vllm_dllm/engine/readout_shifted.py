"""The readout of a masked model that is read as a causal one: position i at row i - 1.

The last row of a canvas predicts the first token of the next one, its *boundary token*. That counts
from the pass over the final canvas, its commit: there it is the likeliest token, whatever the
request's temperature, and it stands decided in the next canvas. So position 0 is never masked.
"""

from __future__ import annotations

import torch

from vllm_dllm.engine.contracts import Readings, StepPlan
from vllm_dllm.engine.readout_masked import MaskedReadout


class ShiftedReadout(MaskedReadout):
    """See `Readout`. Row 0 of what `MaskedReadout` reads is the last row of the canvas."""

    def read(self, hidden: torch.Tensor, plan: StepPlan) -> Readings:
        """See `Readout`."""
        count, length = len(plan.slots), self.slots.length
        if plan.masked is not None:  # the last row counts where the canvas is final
            plan.masked[:, 0] = ~plan.masked.any(1)
        rows = hidden.view(count, length, -1).roll(1, 1).flatten(0, 1)
        readings = super().read(rows, plan)
        token = readings.statistics.token
        following = torch.full_like(token, self.mask_token)
        following[:, 0] = token[:, 0]
        readings.next_canvas = following
        # A rule that rewrites decided positions keeps the token there.
        token[:, 0] = self.slots.tokens[plan.slots, 0]
        return readings
