"""Thresholds that follow the number of requests in a step (`DllmSettings.threshold_under_load`)."""

from __future__ import annotations

import torch

from vllm_dllm.engine.slots import SlotState
from vllm_dllm.settings.server import ThresholdUnderLoad


class LoadThreshold:
    """Writes the threshold of a step to the settings of the slots that follow it.

    A step with as many requests as the one before, and none that is new, costs nothing.
    """

    def __init__(self, rule: ThresholdUnderLoad, slots: SlotState) -> None:
        self.rule = rule
        self.slots = slots
        self.follows = torch.zeros(len(slots.temperature), dtype=torch.bool, device=slots.device)
        self._written: float | None = None

    def enter(self, slot: int, follows: bool) -> None:
        """Note whether the request that enters a slot follows the load."""
        self.follows[slot].fill_(follows)
        self._written = None

    def prepare(self, requests: int) -> None:
        """Write the threshold of the step that comes next, with so many requests."""
        threshold = self.rule.at(requests)
        if threshold == self._written:
            return
        self._written = threshold
        for each in self.slots.algorithms.by_name.values():
            if "threshold" in each.names:
                column = each.parameters[:, each.names.index("threshold")]
                column.masked_fill_(self.follows, threshold)
