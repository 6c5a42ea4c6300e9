"""What happens to the readout before the first request: it is compiled, and it meets its largest
batch while vLLM measures how much memory a step takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_dllm.engine.logprobs import LogprobReports
from vllm_dllm.engine.readout.contract import EXAMPLE_ROWS, Readout, ReadRequest
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import compiling_ahead
from vllm_dllm.settings.resolution import Choice

logger = init_logger("vllm.dllm")

# A request that changes and reads whole rows of logits in every way that takes memory.
COSTLY = RowOptions(
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    logit_bias={0: 1.0},
    min_tokens=1,
    ends=(0,),
    presence=0.5,
    frequency=0.5,
    repetition=1.1,
    logprobs=20,
)


@dataclass
class ReadoutWarmUp:
    """Prepares a readout for requests. All ranks that have a readout call the methods together.

    Attributes:
        readout: the engine's readout.
        reports: where the readout keeps logprobs.
        slots: the engine's slots.
        hidden_size: width of hidden states.
        dtype: dtype of hidden states.
        canvases: the most canvases that a step may hold.
        compiles: whether there is something to compile that is not compiled yet.
        choice: how requests without options are decoded.
    """

    readout: Readout
    reports: LogprobReports
    slots: SlotState
    hidden_size: int
    dtype: torch.dtype
    canvases: int
    compiles: bool
    choice: Choice

    def compile(self) -> None:
        """Compile the readout, unless that has happened.

        Not while the model is loaded: compiled functions depend on the number of threads, which
        vLLM's GPU worker changes afterwards, and they would all be compiled again by requests.
        """
        if not self.compiles:
            return
        self.compiles = False
        begin = time.perf_counter()
        logger.info("dllm: compiling the sampler; the first start of a model takes up to a minute")
        with compiling_ahead():
            self.readout.warm_up(self.hidden(EXAMPLE_ROWS))
        logger.info("dllm: compiled the sampler in %.1f s", time.perf_counter() - begin)

    def fill(self) -> None:
        """Read the largest batch: all canvases drawn, then also with all options of `COSTLY`.

        Whole rows of logits are held for `Readout.canvases` canvases at a time, so no more of them
        have these options. vLLM calls the sampler like this before there are requests; the slots
        are as they were before.
        """
        hidden = self.hidden(self.canvases * self.slots.length)
        on_host: np.ndarray = np.arange(self.canvases)
        costly = range(min(self.canvases, self.readout.canvases))
        with torch.inference_mode():
            self.readout.read(hidden, self._request(on_host, needs_rows=False))
            for slot in costly:
                self.slots.set_row_options(slot, COSTLY)
            try:
                self.readout.read(hidden, self._request(on_host, needs_rows=True))
            finally:
                for slot in costly:
                    self.slots.set_row_options(slot, None)
                    self.reports.forget(slot)
                self.reports.pending.clear()

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

    def hidden(self, rows: int) -> torch.Tensor:
        """Example hidden states, ``[rows, hidden]``."""
        return torch.zeros((rows, self.hidden_size), dtype=self.dtype, device=self.slots.device)
