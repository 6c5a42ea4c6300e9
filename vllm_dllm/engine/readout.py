"""Readouts turn the hidden states of canvases into what a decoding algorithm reads.

One is made when the engine starts: `readout_masked` for a masked model, `readout_noise` for a model
of uniform noise. Both compute row statistics with torch, or with Triton kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CompilationMode

from vllm_dllm.engine.contracts import Readout
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import SlotState

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_readout(
    model: Any, slots: SlotState, parts: OptionalParts, vllm_config: VllmConfig, kernels: str
) -> Readout:
    """Make the readout of a model; `kernels` is ``dllm.kernels``.

    `model` has the members of `MaskedCanvasModel`; without masks, only `has_plain_head` and
    `tiled_head`.
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
        fused = model.tiled_head() if triton else None
        return readout(model.head, slots, parts, compile, fused)
    if triton:
        from vllm_dllm.engine.readout_triton import NoiseKernelReadout

        return NoiseKernelReadout(model.tiled_head(), slots, parts, compile)
    from vllm_dllm.engine.readout_noise import NoiseReadout

    return NoiseReadout(model.tiled_head(), slots, parts, compile)


def compiles(vllm_config: VllmConfig) -> bool:
    """Whether vLLM compiles the model to kernels. If so, what runs after it is compiled too."""
    compilation = vllm_config.compilation_config
    return bool(compilation.mode != CompilationMode.NONE and compilation.backend == "inductor")
