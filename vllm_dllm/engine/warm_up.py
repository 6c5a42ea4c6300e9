"""Prepares a step before the first request: what runs after the model is compiled, and the readout
reads its largest batch while vLLM measures how much memory a step uses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout import EXAMPLE_ROWS, Readout, ReadRequest
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import compiling_ahead
from vllm_dllm.settings.resolution import ResolvedDecoding

if TYPE_CHECKING:
    from vllm_dllm.engine.sampler import DiffusionSampler

logger = init_logger("vllm.dllm")


@dataclass
class ReadoutWarmUp:
    """Prepares a readout for requests. All ranks that have a readout call the methods together.

    Attributes:
        readout: the engine's readout.
        parts: the engine's optional parts.
        slots: the engine's slots.
        hidden_size: width of hidden states.
        dtype: dtype of hidden states.
        canvases: the most canvases that a step may hold.
        compiles: whether something remains to be compiled.
        choice: how requests without options are decoded.
    """

    readout: Readout
    parts: OptionalParts
    slots: SlotState
    hidden_size: int
    dtype: torch.dtype
    canvases: int
    compiles: bool
    choice: ResolvedDecoding

    def compile(self, sampler: DiffusionSampler) -> None:
        """Compile what runs after the model, unless it has been compiled already.

        Canvases that start as random tokens are updated by compiled functions on a GPU, where every
        operator would otherwise launch a kernel. Only the server's own algorithm is compiled, and
        only if this package provides it: other algorithms need not be compilable.

        This must not happen while the model is loaded: compiled functions depend on the number of
        threads, which vLLM's GPU worker changes afterwards, so requests would compile them all
        again.
        """
        if not self.compiles:
            return
        self.compiles = False
        begin = time.perf_counter()
        logger.info("dllm: compiling the sampler; the first start of a model takes up to a minute")
        with compiling_ahead():
            self.readout.warm_up(self._hidden(EXAMPLE_ROWS))
        logger.info("dllm: compiled the sampler in %.1f s", time.perf_counter() - begin)
        on_gpu = self.slots.device.type != "cpu"
        if self.slots.kind.mask_token is None and self.choice.is_ours and on_gpu:
            self.compile_updates(sampler)

    def compile_updates(self, sampler: DiffusionSampler) -> None:
        """Compile the update of canvases without request options, for one canvas and for several.

        This writes to slots, which are set up again for every request.
        """
        sampler.compiled_algorithm = self.choice.algorithm.name
        with compiling_ahead():
            for count in range(1, min(2, len(self.slots.tokens)) + 1):
                self.slots.algorithms.enter(count - 1, self.choice.algorithm, self.choice.settings)
                hidden = self._hidden(count * self.slots.length)
                slot = torch.arange(count, device=hidden.device)
                sampler.update(hidden, slot, np.arange(count), self.slots.length)

    def fill(self) -> None:
        """Read the largest batch: with all canvases drawn, then also with all options of `COSTLY`.

        Whole rows of logits are held for `Readout.canvases` canvases at a time, so no more than
        that many have these options. vLLM calls the sampler like this before there are requests;
        the slots are left unchanged.
        """
        from vllm_dllm.engine.row_options import COSTLY

        hidden = self._hidden(self.canvases * self.slots.length)
        on_host: np.ndarray = np.arange(self.canvases)
        costly = range(min(self.canvases, self.readout.canvases))
        with torch.inference_mode():
            self.readout.read(hidden, self._request(on_host, needs_rows=False))
            for slot in costly:
                self.parts.rows.enter(slot, COSTLY)
            try:
                self.readout.read(hidden, self._request(on_host, needs_rows=True))
            finally:
                for slot in costly:
                    self.parts.leave(slot)
                self.parts.logprobs.pending.clear()

    def _request(self, on_host: np.ndarray, needs_rows: bool) -> ReadRequest:
        count, device = len(on_host), self.slots.device
        return ReadRequest(
            torch.arange(count, device=device),
            on_host,
            self.slots.length,
            torch.ones(count, device=device),
            draws=True,
            needs_rows=needs_rows,
            entropy=True,
        )

    def _hidden(self, rows: int) -> torch.Tensor:
        """Example hidden states, ``[rows, hidden]``."""
        return torch.zeros((rows, self.hidden_size), dtype=self.dtype, device=self.slots.device)
