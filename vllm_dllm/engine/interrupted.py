"""Canvases of preempted requests that have already streamed part of the canvas.

A preempted request gives up its slot and later resumes with its output as part of its prompt. One
that does not stream starts its canvas over, which leads to the same tokens. With
``diffusion_stream_prefix`` the canvas has to resume where it was, with its decided positions, its
step and its algorithm's tensors. These are copied on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import Phase

# Tensors of `SlotState` that hold the state of a canvas. The other tensors can be derived from the
# request's parameters and the number of tokens that it has output.
OF_CANVAS = ("tokens", "masked", "fixed", "start", "tail", "ready", "step", "after_prefill")


@dataclass(frozen=True)
class InterruptedCanvas:
    """Copies of what a slot held when its request was preempted."""

    rows: dict[str, torch.Tensor]  # the slot's rows of the tensors in `OF_CANVAS`, by name
    algorithm_state: dict[str, torch.Tensor]  # the slot's rows of the algorithm's state, by name
    block_before: torch.Tensor  # int64 [L], the tokens of the block before the canvas
    output_end: torch.Tensor  # int64 [], the position after the request's last token
    logprobs: LogprobsTensors | None  # the logprobs of the canvas' decided positions, or None

    @classmethod
    def copy(cls, parts: OptionalParts, slot: int, total_len: torch.Tensor) -> InterruptedCanvas:
        """Copy the canvas in ``slot``; `total_len` are the tokens of each request, ``[slots]``."""
        slots = parts.slots
        rows = {name: getattr(slots, name)[slot].clone() for name in OF_CANVAS}
        phase = slots.phase[slot]
        # A request that is preempted again before its prompt has been reread is still in prefill;
        # the phase to resume is then the one that it was about to enter.
        in_prefill = phase == int(Phase.PREFILL)
        rows["after_prefill"] = torch.where(in_prefill, rows["after_prefill"], phase)
        before = (rows["start"] - slots.length + slots.position).clamp_min(0)
        state = slots.algorithms.for_slot(slot).state
        return cls(
            rows,
            {name: tensor[slot].clone() for name, tensor in state.items()},
            slots.history[slot].index_select(0, before).long(),
            total_len[slot].long(),
            parts.logprobs.copy(slot) if slots.reports[slot] else None,
        )

    def resume(
        self, parts: OptionalParts, slot: int, known: Sequence[int], prompt_length: int
    ) -> None:
        """Restore the canvas to the ``slot`` that its request has just entered.

        `known` are the tokens that the resumed request has as its prompt, of which `prompt_length`
        are its original prompt.
        """
        slots = parts.slots
        # This waits for the device, but only for requests that stream and have been preempted.
        start, output_end = torch.stack([self.rows["start"], self.output_end]).tolist()
        if start > len(known):
            # vLLM has dropped the result of the step in which the block before this canvas left, so
            # that block has to leave again.
            start -= slots.length
            slots.tokens[slot].copy_(self.block_before)
            slots.masked[slot].fill_(False)
            slots.fixed[slot].copy_(slots.position < prompt_length - start)
            slots.start[slot].fill_(start)
            slots.ready[slot].fill_(min(output_end - start, slots.length))
            slots.after_prefill[slot].fill_(int(Phase.COMMIT))
        else:
            for name, row in self.rows.items():
                getattr(slots, name)[slot].copy_(row)
            for name, row in self.algorithm_state.items():
                slots.algorithms.for_slot(slot).state[name][slot].copy_(row)
        # This is less than before if vLLM has dropped what the last step streamed; those tokens are
        # then output again.
        slots.tail[slot].fill_(len(known) - start)
        if slots.constrained[slot]:
            read, before = known, start
            if slots.kind.blocks > 1:
                own = torch.tensor([slot], device=slots.device)
                finished = start + int(slots.finished_end(own))
                read = [*known[:start], *slots.tokens[slot].tolist()][: max(finished, len(known))]
                before = finished if int(slots.blocks[slot]) == 1 else start
            parts.constraints.resume(slot, read[prompt_length:], max(before - prompt_length, 0))
        if self.logprobs is not None:
            parts.logprobs.restore(slot, self.logprobs)
