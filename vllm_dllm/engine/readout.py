"""Readouts turn the hidden states of canvases into what a decoding algorithm reads.

This file defines what a step asks of a readout and what it gets back, and makes the readout once,
when the engine starts: `readout_masked` for a masked model, `readout_noise` for a model of uniform
noise. Both compute row statistics with torch, or with the Triton kernels of `readout_triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from vllm.config.compilation import CompilationMode

from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.statistics.ranked import RankedTokens
from vllm_dllm.ops.statistics.rows import RowStatistics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dllm.engine.constraints import ConstrainedStep
    from vllm_dllm.engine.optional_parts import OptionalParts

# The number of rows in the examples used to compile functions ahead of time. The compiler lays out
# its loops for that size, which is a few canvases; compiled functions accept any number of rows.
EXAMPLE_ROWS = 128
# So few logits take a CPU less time than the choice of rows.
FEW_LOGITS = 1 << 16


@dataclass
class ReadRequest:
    """The canvases of a batch, and what must be read from the model's output for them.

    Attributes:
        slots: int64 ``[n]``, the slots of the batch, on the device.
        on_host: the same slots as a numpy array.
        width: number of positions of each canvas, int64 ``[n]``, or L for all of them.
        temperature: float32 ``[n]``, the temperatures of this step; 0 is greedy.
        draws: whether any request of the batch draws.
        needs_rows: whether any request of the batch has biases, filters or logprobs.
        adjust: ids int64 ``[n, L]`` and the values to add to their logits (float32 ``[n, L]``), or
            None.
        ask: ids int64 ``[n, L, K]`` whose log-probabilities are needed, or None.
        likeliest: how many of the likeliest tokens of each position are needed; 0 for none.
        entropy: whether entropies are needed.
        constraint: what these canvases must follow; None if no request has a constraint.
        may_go_on: whether any canvas may be denoised again after this step, as far as the host can
            tell; if not, no soft embedding is needed.
        own_confidence_temperature: float32 ``[n]``, see `with_drawn`; None if no algorithm of the
            batch asks for it.
        logprob: whether `Readings.logprob` is needed.
        masked: bool ``[n, L]``, the only positions whose statistics are read; None for all.
        rows: int64 ``[k]``, the positions, counted over the batch, whose logits exist; None for
            all.
    """

    slots: torch.Tensor
    on_host: np.ndarray
    width: torch.Tensor | int
    temperature: torch.Tensor
    draws: bool = False
    needs_rows: bool = False
    adjust: tuple[torch.Tensor, torch.Tensor] | None = None
    ask: torch.Tensor | None = None
    entropy: bool = False
    constraint: ConstrainedStep | None = None
    may_go_on: bool = True
    own_confidence_temperature: torch.Tensor | None = None
    logprob: bool = False
    masked: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    likeliest: int = 0

    def masked_rows(self) -> torch.Tensor | None:
        """The rows of masked positions, int64 ``[k]``, at least one; None to read all rows."""
        if self.masked is None:
            return None
        found = self.masked.flatten().nonzero()[:, 0]
        return found if len(found) else torch.zeros(1, dtype=torch.int64)

    def part(self, first: int, end: int) -> ReadRequest:
        """The request for the canvases ``first..end`` of the batch."""
        rows = slice(first, end)
        own = self.own_confidence_temperature
        return ReadRequest(
            self.slots[rows],
            self.on_host[rows],
            self.width if isinstance(self.width, int) else self.width[rows],
            self.temperature[rows],
            draws=self.draws,
            needs_rows=self.needs_rows,
            adjust=None if self.adjust is None else (self.adjust[0][rows], self.adjust[1][rows]),
            ask=None if self.ask is None else self.ask[rows],
            entropy=self.entropy,
            constraint=None if self.constraint is None else self.constraint.part(rows),
            may_go_on=self.may_go_on,
            own_confidence_temperature=None if own is None else own[rows],
            logprob=self.logprob,
            masked=None if self.masked is None else self.masked[rows],
            likeliest=self.likeliest,
        )


@dataclass
class Readings:
    """The result of a readout: what it computed from the hidden states of a batch of canvases.

    Attributes:
        statistics: row statistics ``[n, L]``.
        noise: int64 ``[n, L]``, uniform random tokens; None for a masked model.
        next_canvas: int64 ``[n, L]``, the tokens with which the canvases after these begin: uniform
            random tokens, or masks after the token that `readout_shifted` has read. None for other
            masked models, or if not all canvases are L wide.
        soft_embedding: float32 ``[n, L, hidden]``, before the embedding's scale; None for a masked
            model, or if no canvas may go on.
        log_probabilities: float32 ``[n, L, K]``, those of the ids in `ReadRequest.ask`, or None.
        logprob: float32 ``[n, L]``, the log-probabilities at temperature 1 of the tokens in
            `statistics`, filters aside. Those of requests with biases or constraints are
            meaningless. None if it is not needed, and for a model of uniform noise.
        likeliest: ``[n, L, K]``, see `ReadRequest.likeliest`; None if it is 0.
    """

    statistics: RowStatistics
    noise: torch.Tensor | None = None
    next_canvas: torch.Tensor | None = None
    soft_embedding: torch.Tensor | None = None
    log_probabilities: torch.Tensor | None = None
    logprob: torch.Tensor | None = None
    likeliest: RankedTokens | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key by which a compiled function may tell these readings from others."""
        optional = self.noise, self.next_canvas, self.soft_embedding, self.log_probabilities
        others = self.logprob, self.likeliest
        return type(self.statistics), *(part is None for part in (*optional, *others))


class Readout(Protocol):
    """Computes `Readings` from hidden states; an engine has one, chosen when it starts.

    Attributes:
        canvases: the number of canvases whose whole rows of logits exist at a time.
        triton: whether Triton kernels compute the row statistics.
    """

    canvases: int
    triton: bool

    def read(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """Return the readings of a batch from its hidden states ``[n * L, hidden]``."""
        ...

    def warm_up(self, hidden: torch.Tensor) -> None:
        """Call every compiled function of a step once, to compile it before the first request.

        All ranks call this together.

        Args:
            hidden: example hidden states, ``[EXAMPLE_ROWS, hidden]``.
        """
        ...


def make_readout(
    model: Any, slots: SlotState, parts: OptionalParts, vllm_config: VllmConfig, kernels: str
) -> Readout:
    """Make the readout of a model.

    Args:
        model: has the members of `MaskedCanvasModel`; without masks, only `has_plain_head` and
            `tiled_head`.
        slots: the engine's slots.
        parts: the engine's optional parts.
        vllm_config: vLLM's configuration.
        kernels: ``dllm.kernels``.
    """
    compile, masked = compiles(vllm_config), slots.kind.mask_token is not None
    triton = kernels == "triton"
    if masked and not model.has_head:  # an earlier pipeline stage, which never reads
        triton = False
    elif kernels == "auto" and slots.device.type == "cuda":
        from vllm_dllm.engine.kernel_choice import triton_works

        ranks = vllm_config.parallel_config.tensor_parallel_size
        triton = triton_works(model, masked, slots.device, ranks)
    if masked:
        from vllm_dllm.engine.readout_masked import MaskedReadout

        readout = MaskedReadout
        if slots.kind.shifted:
            from vllm_dllm.engine.readout_shifted import ShiftedReadout

            readout = ShiftedReadout
        if not triton:
            return readout(model.head, slots, parts, compile)
        from vllm_dllm.engine.readout_triton import MaskedKernels

        return readout(model.head, slots, parts, compile, MaskedKernels(model.tiled_head()))
    from vllm_dllm.engine.readout_noise import NoiseReadout

    if not triton:
        return NoiseReadout(model.tiled_head(), slots, parts, compile)
    from vllm_dllm.ops.statistics.soft_embedding_triton import fused_statistics

    return NoiseReadout(model.tiled_head(), slots, parts, compile, fused_statistics)


def compiles(vllm_config: VllmConfig) -> bool:
    """Whether vLLM compiles the model to kernels. If so, what runs after it is compiled too."""
    compilation = vllm_config.compilation_config
    return bool(compilation.mode != CompilationMode.NONE and compilation.backend == "inductor")
