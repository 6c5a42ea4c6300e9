"""Choose the batch sizes that get CUDA graphs if the user gave none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")

# The numbers of canvases for which a denoise step has a graph.
CANVASES = (*range(1, 17), *range(20, 33, 4), *range(40, 65, 8))
# A step of more tokens keeps the device busy for longer than launching its kernels takes, and the
# memory for its graph is better used for the KV cache.
MOST_TOKENS = 4096
# vLLM's own sizes, which are for batches with prompts.
MIXED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def capture_sizes(length: int, seats: int, budget: int) -> list[int]:
    """The sizes of the captured batches in tokens, ascending.

    vLLM stops at 512 tokens, which is 16 canvases of 32 tokens or 2 of 256. For full graphs its
    runner rounds each size up to whole canvases (a canvas is L tokens there, without an additional
    sampled token); for piecewise graphs it uses the sizes as they are.

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
    """Set vLLM's capture sizes, unless the user gave some or wants no graphs."""
    from vllm.config.compilation import CUDAGraphMode

    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    given = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size)
    if given != (None, None) or compilation.cudagraph_mode == CUDAGraphMode.NONE:
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
