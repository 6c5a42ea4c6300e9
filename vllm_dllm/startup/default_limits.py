"""Choose limits for requests and tokens, and sizes of CUDA graphs, that the user did not set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_dllm.settings.server import LENGTH, SETTINGS_KEY

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.dllm")

# The most requests that run at a time by default; vLLM's default for large GPUs, 1024, is meant for
# steps of one token per request. A self-conditioned model holds a soft embedding for each of them.
MOST_SEATS = 256
MOST_SEATS_SELF_CONDITIONED = 64
# The numbers of canvases for which a denoise step has a graph.
CANVASES = (*range(1, 17), *range(20, 33, 4), *range(40, 65, 8))
# A step of more tokens keeps the device busy for longer than launching its kernels takes.
MOST_TOKENS = 4096
# vLLM's own sizes, which are for batches with prompts.
MIXED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def set_defaults(
    args: Any, model_config: ModelConfig, given: tuple[bool, bool], self_conditioned: bool
) -> None:
    """Adjust vLLM's *defaults*, which are in `args`, so that canvases fit.

    `given` says whether the user gave ``max_num_seqs`` and ``max_num_batched_tokens``.
    """
    from vllm.platforms import current_platform

    chosen = (args.diffusion_config or {}).get("canvas_length")
    length = chosen or getattr(model_config.hf_config, "canvas_length", None)
    if length is None:
        return  # the family's `configure` names what is missing
    LENGTH.check("canvas_length", length)
    section = (args.additional_config or {}).get(SETTINGS_KEY)
    blocks = section.get("blocks") if isinstance(section, Mapping) else None
    if isinstance(blocks, int):  # whether it may be is checked where settings are parsed
        length *= max(1, blocks)
    most = MOST_SEATS_SELF_CONDITIONED if self_conditioned else MOST_SEATS
    if not given[0] and args.max_num_seqs > most:
        logger.info(
            f"dllm: max_num_seqs={most} instead of vLLM's {args.max_num_seqs}: a step denoises a "
            f"canvas of {length} tokens for each request; set --max-num-seqs to choose"
        )
        args.max_num_seqs = most
    stock, needed = args.max_num_batched_tokens, args.max_num_seqs * length
    if given[1] or needed <= stock:
        return
    logger.info(
        f"dllm: max_num_batched_tokens raised from {stock} to {needed}, so that "
        f"{args.max_num_seqs} canvases of {length} tokens fit into one step"
    )
    args.max_num_batched_tokens = needed
    # A prompt's chunk of the whole budget would make every canvas of the step wait.
    # vLLM refuses a threshold above the context length, which would have no effect anyway.
    limits_chunks = length <= stock < model_config.max_model_len
    if limits_chunks and not args.long_prefill_token_threshold and not current_platform.is_cpu():
        logger.info(
            f"dllm: long_prefill_token_threshold={stock}: beside other requests a prompt takes no "
            "more tokens of a step than by vLLM's default budget"
        )
        args.long_prefill_token_threshold = stock


def capture_sizes(length: int, seats: int, budget: int) -> list[int]:
    """The sizes of the captured batches in tokens, ascending, for canvases of `length` tokens.

    vLLM stops at 512 tokens, which is 16 canvases of 32 tokens or 2 of 256. For full graphs its
    runner rounds each size up to whole canvases; for piecewise graphs it uses them as they are.
    `seats` is ``max_num_seqs``, and `budget` ``max_num_batched_tokens``.
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
        f"dllm: CUDA graphs for up to {sizes[-1]} tokens, {sizes[-1] // length} canvases of "
        f"{length}; set cudagraph_capture_sizes to choose"
    )
