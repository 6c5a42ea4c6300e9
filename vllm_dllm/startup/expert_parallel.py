"""Start-up checks of ``--enable-expert-parallel`` and of what belongs to it.

With it each rank holds whole experts. A map tells a kernel which of all experts are its own, and
the kernel skips the others. The kernel of vLLM's CPU build takes no such map: it would read behind
its weights, and workers of two ranks end with a segmentation fault at the first request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_dllm.ranges import SettingsError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

CANNOT_BE_SPREAD = (
    "--enable-expert-parallel: on the CPU vLLM's experts cannot be spread over ranks, because "
    "their kernel takes no map of experts and would crash; remove it (each rank then has a part "
    "of every expert)"
)


def cannot_be_spread(vllm_config: VllmConfig) -> bool:
    """Whether experts would be spread over ranks that compute them with vLLM's kernel for the CPU.

    A single rank has all experts, and a dense model has none: there the option changes nothing.
    """
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    return (
        parallel.enable_expert_parallel
        and ranks > 1
        and vllm_config.model_config.is_moe
        and current_platform.is_cpu()
    )


def refuse_balancing(engine_args: Any, model_config: ModelConfig) -> None:
    """Refuse ``--enable-eplb``, before vLLM complains of it without its name.

    Args:
        engine_args: vLLM's ``EngineArgs``.
        model_config: of a model of ours.

    Raises:
        SettingsError: with the option's name and the remedy.
    """
    from vllm.platforms import current_platform

    if engine_args.enable_eplb:
        reason = "not supported for diffusion models"
        if current_platform.is_cpu():
            reason = "vLLM moves experts between ranks on GPUs only"
        elif not model_config.is_moe:
            reason = "this model has no experts"
        raise SettingsError(f"--enable-eplb: {reason}; remove it")
