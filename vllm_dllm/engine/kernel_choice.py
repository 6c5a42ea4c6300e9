"""The choice between torch and this package's Triton kernels where ``dllm.kernels`` is ``auto``."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON

logger = init_logger("vllm.dllm")


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
