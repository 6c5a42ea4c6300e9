"""Start-up check of ``--enable-expert-parallel``.

With this option each rank holds whole experts. A map tells a kernel which experts are on its rank,
and the kernel skips the others. The kernel of vLLM's CPU build takes no such map, so it would read
past the end of its weights: with two ranks the workers crash with a segmentation fault at the first
request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CANNOT_BE_SPREAD = (
    "--enable-expert-parallel: on the CPU vLLM's experts cannot be spread over ranks, because "
    "their kernel takes no map of experts and would crash; remove it (each rank then has a part "
    "of every expert)"
)


def cannot_be_spread(vllm_config: VllmConfig) -> bool:
    """Whether experts would be spread over ranks that compute them with vLLM's kernel for the CPU.

    The option has no effect on a single rank, which has all experts, or on a dense model, which has
    none.
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
