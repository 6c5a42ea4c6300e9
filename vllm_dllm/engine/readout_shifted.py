"""A masked model's readout where models are read as causal ones are."""

from __future__ import annotations

import torch

from vllm_dllm.engine.contracts import Readings, StepPlan
from vllm_dllm.engine.readout_masked import MaskedReadout


class ShiftedReadout(MaskedReadout):
    """The readout of a masked model that is read as a causal one: position i at row i - 1.

    The last row of a canvas predicts the first token of the next one, its *boundary token*. That
    counts from the pass over the final canvas, its commit: there it is the likeliest token,
    whatever the request's temperature, and it stands decided in the next canvas. So position 0 is
    never masked, and row 0 of what `MaskedReadout` reads is the last row of the canvas, or the row
    of the prompt's last token where a canvas begins with that, see `SlotState.enter`.
    """

    def read(self, hidden: torch.Tensor, plan: StepPlan) -> Readings:
        """See `Readout`."""
        count, length = len(plan.slots), self.slots.length
        if plan.masked is not None:  # the last row counts where the canvas is final
            plan.masked[:, 0] = ~plan.masked.any(1)
        canvases = hidden.view(count, length, -1)
        rows = canvases.roll(1, 1)
        if not self.slots.kind.aligned:
            ends_prompt = self.slots.tail[plan.slots] > 0
            rows[:, 0] = torch.where(ends_prompt[:, None], canvases[:, 0], rows[:, 0])
        readings = super().read(rows.flatten(0, 1), plan)
        token = readings.statistics.token
        readings.next_canvas = torch.full_like(token, self.mask_token)
        readings.next_canvas[:, 0] = token[:, 0]
        # A rule that rewrites decided positions keeps the token there.
        token[:, 0] = self.slots.tokens[plan.slots, 0]
        return readings
