"""Which sizes of batches get CUDA graphs where the user gave none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")

# Numbers of canvases that a step of denoising has a graph for.
CANVASES = (*range(1, 17), *range(20, 33, 4), *range(40, 65, 8))
# A step of more tokens keeps the device busy for longer than it takes to launch its kernels, and
# the memory that its graph holds is worth more to the KV cache.
MOST_TOKENS = 4096
# vLLM's own sizes, for batches with prompts.
MIXED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def capture_sizes(length: int, seats: int, budget: int) -> list[int]:
    """Tokens of the batches that are captured, ascending.

    vLLM ends at 512 tokens: at 16 canvases of 32, and at 2 of 256. Its runner rounds each size up
    to whole canvases for full graphs (a canvas is L tokens there, without a token that is sampled
    beside it), and takes the sizes as they are for piecewise ones.

    Args:
        length: L, tokens of a canvas.
        seats: ``max_num_seqs``.
        budget: ``max_num_batched_tokens``.
    """
    most = min(seats, max(CANVASES))
    canvases = {count for count in (*CANVASES, most) if count <= most}
    sizes = {count * length for count in canvases if count * length <= MOST_TOKENS}
    sizes |= {size for size in MIXED if size <= 2 * seats * length}
    return sorted(size for size in sizes if size <= budget)


def set_capture_sizes(vllm_config: VllmConfig, length: int) -> None:
    """Tell vLLM the sizes, unless the user gave some or there are no graphs."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform

    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    given = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size)
    if given != (None, None) or compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    if vllm_config.model_config.enforce_eager or not current_platform.support_static_graph_mode():
        return
    sizes = capture_sizes(length, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    compilation.cudagraph_capture_sizes = sizes
    logger.info(
        "dllm: CUDA graphs for up to %d tokens, %d canvases of %d; set cudagraph_capture_sizes to "
        "choose",
        sizes[-1],
        sizes[-1] // length,
        length,
    )
