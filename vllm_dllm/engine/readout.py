"""Readouts turn the hidden states of canvases into what a decoding algorithm reads.

One is made when the engine starts: `readout_masked` for a masked model, `readout_noise` for a model
of uniform noise. Both compute row statistics with torch, or with Triton kernels.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CompilationMode
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON

from vllm_dllm.engine.contracts import Readout
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import SlotState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


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
        ranks = vllm_config.parallel_config.tensor_parallel_size
        triton = triton_works(model, masked, slots.device, ranks)
    if masked:
        from vllm_dllm.engine.readout_masked import MaskedReadout, ShiftedReadout

        readout = ShiftedReadout if slots.kind.shifted else MaskedReadout
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


def triton_works(model: Any, masked: bool, device: torch.device, ranks: int) -> bool:
    """Whether Triton kernels can compute the row statistics (``auto``); logs the decision.

    All `ranks` that share the head call this together, and all get the same answer.
    """
    obstacle = _obstacle(model)
    if obstacle is not None:
        logger.info("dllm: row statistics by torch (dllm.kernels=auto: %s)", obstacle)
        return False
    begin = time.perf_counter()
    failed = _failures(model, masked)
    if failed:
        logger.warning("dllm: Triton kernels failed their self-test: %s", "; ".join(failed))
    anywhere = bool(failed)
    if ranks > 1:
        own = torch.tensor([float(anywhere)], device=device)
        anywhere = bool(tensor_model_parallel_all_reduce(own)[0])
    if anywhere:
        logger.warning("dllm: row statistics by torch (dllm.kernels=auto: the self-test failed)")
        return False
    logger.info(
        "dllm: row statistics by triton (dllm.kernels=auto: the self-test passed in %.1f s)",
        time.perf_counter() - begin,
    )
    return True


def _obstacle(model: Any) -> str | None:
    """The reason not to try the kernels, or None. It is the same on all ranks."""
    if torch.version.hip is not None:
        return "no CUDA device"
    if not HAS_TRITON:
        return "vLLM has no Triton here"
    if not model.has_plain_head:
        return "the head is quantized, or more than a matrix"
    return None


def _failures(model: Any, masked: bool) -> list[str]:
    """The names of the checks that the kernels fail; a kernel that does not run fails too."""
    try:
        from vllm_dllm.ops.statistics.self_test_triton import failures

        return failures(model.tiled_head(), masked)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
