"""Canvases of preempted requests that have streamed a part of them.

A preempted request gives its slot away and comes back with its output as prompt. Whatever has not
streamed starts its canvas over, which leads to the same tokens. With ``diffusion_stream_prefix`` a
part of the canvas is output by then, and the canvas has to go on where it was: with its decided
positions, its step and its algorithm's tensors. They are copied on the device, when such a request
is preempted and at no other time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_dllm.worker.logprobs import LogprobReports
from vllm_dllm.worker.slots import Phase, SlotState

# Tensors of `SlotState` that a canvas is made of. The others follow from the request's parameters
# and from how much it has put out.
OF_CANVAS = ("tokens", "masked", "fixed", "start", "tail", "ready", "step", "after_prefill")


@dataclass(frozen=True)
class InterruptedCanvas:
    """What a slot held when its request was preempted; copies of the slot's rows.

    Attributes:
        rows: of `SlotState`, by name, see `OF_CANVAS`.
        algorithm_state: the algorithm's tensors between steps.
        block_before: int64 ``[L]``, the tokens before the canvas.
        output_end: int64 ``[]``, position behind the request's last token.
        logprobs: of the canvas' decided positions, or None.
    """

    rows: dict[str, torch.Tensor]
    algorithm_state: dict[str, torch.Tensor]
    block_before: torch.Tensor
    output_end: torch.Tensor
    logprobs: Any

    @classmethod
    def of(
        cls, slots: SlotState, slot: int, reports: LogprobReports, total_len: torch.Tensor
    ) -> InterruptedCanvas:
        """Copy what belongs to the canvas in ``slot``; `total_len` int32 ``[slots]`` is vLLM's."""
        rows = {name: getattr(slots, name)[slot].clone() for name in OF_CANVAS}
        phase = slots.phase[slot]
        # Preempted again before its prompt was read again: it still waits for its phase.
        waits = phase == int(Phase.PREFILL)
        rows["after_prefill"] = torch.where(waits, rows["after_prefill"], phase)
        before = (rows["start"] - slots.length + slots.position).clamp_min(0)
        return cls(
            rows,
            {
                name: tensor[slot].clone()
                for name, tensor in slots.algorithms.of(slot).state.items()
            },
            slots.history[slot].index_select(0, before).long(),
            total_len[slot].long(),
            reports.kept.get(slot),
        )

    def resume(
        self, slots: SlotState, slot: int, reports: LogprobReports, known: int, asked: int
    ) -> None:
        """Put the canvas into the ``slot`` that its request has just entered.

        Args:
            slots: the slots.
            slot: where the request is now.
            reports: keeps logprobs.
            known: number of tokens that the request has come back with.
            asked: how many of them are its prompt.
        """
        # Read on the host: only requests that stream and have been preempted come here.
        start, output_end = torch.stack([self.rows["start"], self.output_end]).tolist()
        if start > known:
            # vLLM dropped the result of the step in which this block left: it leaves again.
            self._resume_commit(slots, slot, start - slots.length, output_end, asked)
        else:
            for name, row in self.rows.items():
                getattr(slots, name)[slot].copy_(row)
            for name, row in self.algorithm_state.items():
                slots.algorithms.of(slot).state[name][slot].copy_(row)
            # Less than before where vLLM dropped what the last step streamed: it is put out again.
            slots.tail[slot].fill_(known - start)
        if self.logprobs is not None:
            reports.kept[slot] = self.logprobs

    def _resume_commit(
        self, slots: SlotState, slot: int, start: int, output_end: int, asked: int
    ) -> None:
        slots.tokens[slot].copy_(self.block_before)
        slots.masked[slot].fill_(False)
        slots.fixed[slot].copy_(slots.position < asked - start)
        slots.start[slot].fill_(start)
        slots.ready[slot].fill_(min(output_end - start, slots.length))
        slots.after_prefill[slot].fill_(int(Phase.COMMIT))
