"""The choice of an engine's readout, made once when the engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CompilationMode

from vllm_dllm.engine.logprobs import LogprobReports
from vllm_dllm.engine.readout.contract import Readout
from vllm_dllm.engine.readout.dense import DenseReadout
from vllm_dllm.engine.readout.kernels import takes_triton
from vllm_dllm.engine.readout.sharded import ShardedReadout
from vllm_dllm.engine.readout.tiled import TiledReadout
from vllm_dllm.engine.slots import SlotState

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class ReadoutSettings:
    """What the choice of a readout depends on.

    Attributes:
        kernels: ``dllm.kernels``, see `takes_triton`.
        compile: compile what runs after the model, because vLLM compiles the model too.
        ranks: number of ranks that the head is spread over.
    """

    kernels: str
    compile: bool
    ranks: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, kernels: str) -> ReadoutSettings:
        """From vLLM's configuration and ``dllm.kernels``."""
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return cls(kernels, compiles(vllm_config), ranks)


def compiles(vllm_config: VllmConfig) -> bool:
    """Whether vLLM compiles the model to kernels. If so, what runs after it is compiled, too."""
    compilation = vllm_config.compilation_config
    return bool(compilation.mode != CompilationMode.NONE and compilation.backend == "inductor")


def masked_readout(
    model: Any, slots: SlotState, reports: LogprobReports, settings: ReadoutSettings
) -> Readout:
    """The readout of a masked model. `model` has the members of `MaskedCanvasModel`."""
    common = slots, reports, settings.compile
    if not model.has_head:  # an earlier pipeline stage, which never reads
        return DenseReadout(model.head, *common)
    if takes_triton(settings.kernels, model, True, slots.device, settings.ranks):
        from vllm_dllm.engine.readout.triton import TritonDenseReadout

        return TritonDenseReadout(model.head, model.tiled_head(), *common)
    if settings.ranks > 1 and model.has_plain_head:
        return ShardedReadout(model.head, model.tiled_head(), *common)
    return DenseReadout(model.head, *common)


def noise_readout(
    model: Any, slots: SlotState, reports: LogprobReports, settings: ReadoutSettings
) -> Readout:
    """The readout of a model of uniform noise. `model` has `has_plain_head` and `tiled_head`."""
    if takes_triton(settings.kernels, model, False, slots.device, settings.ranks):
        from vllm_dllm.engine.readout.triton import TritonTiledReadout

        return TritonTiledReadout(model.tiled_head(), slots, reports, settings.compile)
    return TiledReadout(model.tiled_head(), slots, reports, settings.compile)
