"""Request state: one slot per running request, in tensors allocated once.

Everything that belongs to a request and changes from step to step lives here, on the
device, and is updated in place. Phases and masks are explicit; no token id is ever asked
what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import numpy as np
import torch

from vllm_dllm.decoding import Canvas

# End-of-sequence ids that may finish a block early, per request. A request with more ids
# still stops at each of them (vLLM's scheduler sees to that), only without the short cut.
MAX_END_TOKENS = 8
NO_TOKEN = -1


class Phase(IntEnum):
    """What the next forward pass over a slot's canvas is for."""

    PREFILL = 0  # prompt chunks; the canvas waits
    DENOISE = 1  # changes the canvas, keeps nothing in the KV cache
    COMMIT = 2  # runs over the final canvas; its KV stays and the tokens leave


class SlotState:
    """The slots' tensors, indexed by vLLM's request index.

    Attributes:
        tokens, masked, fixed: ``[slots, L]``, see `Canvas`.
        phase: int8 ``[slots]``, a `Phase`.
        tail: int64 ``[slots]``, fixed prompt positions at the start of the canvas.
        ready: int64 ``[slots]``, canvas prefix that leaves at the commit.
        step: int32 ``[slots]``, denoise steps that the canvas has taken.
        max_steps: int32 ``[slots]``, the cap on `step`.
        end_tokens: int64 ``[slots, MAX_END_TOKENS]``, padded with ``NO_TOKEN``.
        parameters: float32 ``[slots]`` each, the algorithm's per-slot parameters.
    """

    def __init__(
        self,
        slots: int,
        length: int,
        mask_token: int,
        parameters: Sequence[str],
        device: torch.device,
    ) -> None:
        self.length = length
        self.mask_token = mask_token
        self.device = device
        self.tokens = torch.full((slots, length), mask_token, dtype=torch.int64, device=device)
        self.masked = torch.ones((slots, length), dtype=torch.bool, device=device)
        self.fixed = torch.zeros((slots, length), dtype=torch.bool, device=device)
        self.phase = torch.zeros(slots, dtype=torch.int8, device=device)
        self.tail = torch.zeros(slots, dtype=torch.int64, device=device)
        self.ready = torch.zeros(slots, dtype=torch.int64, device=device)
        self.step = torch.zeros(slots, dtype=torch.int32, device=device)
        self.max_steps = torch.ones(slots, dtype=torch.int32, device=device)
        self.end_tokens = torch.full(
            (slots, MAX_END_TOKENS), NO_TOKEN, dtype=torch.int64, device=device
        )
        self.parameters = {
            name: torch.zeros(slots, dtype=torch.float32, device=device) for name in parameters
        }

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """A request enters ``slot``: lay out its first canvas behind the prompt.

        Blocks are aligned to absolute multiples of L, so the last ``len(prompt) % L``
        prompt tokens are the canvas' first positions, fixed.
        """
        tail = len(prompt) % self.length
        row: np.ndarray = np.full(self.length, self.mask_token, dtype=np.int64)
        if tail:
            row[:tail] = prompt[len(prompt) - tail :]
        self.tokens[slot].copy_(torch.from_numpy(row))
        self.masked[slot].fill_(True)
        self.masked[slot, :tail].fill_(False)
        self.fixed[slot].fill_(False)
        self.fixed[slot, :tail].fill_(True)
        self.phase[slot].fill_(Phase.PREFILL)
        self.tail[slot].fill_(tail)
        self.ready[slot].fill_(0)
        self.step[slot].fill_(0)

    def configure(
        self,
        slot: int,
        max_steps: int,
        end_tokens: Iterable[int],
        parameters: Mapping[str, float],
    ) -> None:
        """Set what the request in ``slot`` chose."""
        self.max_steps[slot].fill_(max_steps)
        row: np.ndarray = np.full(MAX_END_TOKENS, NO_TOKEN, dtype=np.int64)
        ids = sorted(set(end_tokens))[:MAX_END_TOKENS]
        row[: len(ids)] = ids
        self.end_tokens[slot].copy_(torch.from_numpy(row))
        for name, tensor in self.parameters.items():
            tensor[slot].fill_(float(parameters[name]))

    def canvas(self, slots: torch.Tensor) -> Canvas:
        """The canvases of ``slots`` (int64 ``[n]``), as copies."""
        return Canvas(self.tokens[slots], self.masked[slots], self.fixed[slots])

    def store(self, slots: torch.Tensor, canvas: Canvas) -> None:
        """Write canvases back to ``slots``."""
        self.tokens.index_copy_(0, slots, canvas.tokens)
        self.masked.index_copy_(0, slots, canvas.masked)
        self.fixed.index_copy_(0, slots, canvas.fixed)
