"""Choose when a finished block's keys and values are written, and log the reason.

There are three ways, with the same output:

- *separate*: in a separate forward pass, after the block's last denoise step;
- *granted*: in the pass of the next block's first denoise step, for which the scheduler grants 2 L
  tokens. It must know a step's outcome before it plans the next one;
- *two blocks*: in every denoise step of the next block, which always reads 2 L tokens, so that a
  step may be in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.server import GRANTED, SEPARATE, TWO_BLOCKS, DllmSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")

WORDS = {
    SEPARATE: "in passes of their own",
    GRANTED: "with the first step of the next block",
    TWO_BLOCKS: "with every step of the next block",
}
# Up to this many tokens of a step cost next to nothing beside reading the weights. In bfloat16 a
# token takes as many operations as a weight matrix has bytes, so the limit of a GPU is its
# operations per second over its bytes per second: 156 on an A100, 295 on an H100.
FREE_TOKENS_GPU = 128
# `benchmarks/sdar.py` measured that two blocks are still clearly faster with four requests.
FREE_TOKENS_CPU = 32


def choose_commits(
    vllm_config: VllmConfig, settings: DllmSettings, in_place: bool, length: int, shifted: bool
) -> str:
    """Choose `SEPARATE`, `GRANTED` or `TWO_BLOCKS` for blocks of `length` tokens; log the reason.

    `in_place` says whether the model's commits and steps have the same mask and input; see also
    `Family.shifted`. Raises `SettingsError` if ``dllm.fused_commit=on`` is impossible.
    """
    from vllm.platforms import current_platform

    # VLLM decides later whether a step will be in flight while the next one is scheduled. A few
    # executors cannot do it; a window of two blocks is correct there as well.
    asynchronous = vllm_config.scheduler_config.async_scheduling
    if asynchronous is None:
        asynchronous = not current_platform.is_cpu()
    asked = settings.fused_commit
    window = 2 * length if asynchronous else 0
    obstacle = _obstacle(vllm_config, settings, in_place, window, shifted)
    if asked == "on" and obstacle is not None:
        raise SettingsError(f"dllm.fused_commit=on: impossible, because {obstacle}")
    if asked == "off":
        way, reason = SEPARATE, "dllm.fused_commit=off"
    elif obstacle is not None:
        way, reason = SEPARATE, obstacle
    elif asked == "on":
        way, reason = TWO_BLOCKS if asynchronous else GRANTED, "dllm.fused_commit=on"
    elif not asynchronous:
        way, reason = GRANTED, "scheduling is synchronous"
    else:
        way, reason = _by_cost(vllm_config, length)
    logger.info("dllm: blocks are committed %s (%s)", WORDS[way], reason)
    return way


def _obstacle(
    vllm_config: VllmConfig, settings: DllmSettings, in_place: bool, window: int, shifted: bool
) -> str | None:
    """Why commits cannot share a pass, or None; `window` is 0 if scheduling is synchronous."""
    scheduler = vllm_config.scheduler_config
    budget = min(
        scheduler.max_num_batched_tokens,
        scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens,
    )
    obstacles = {
        "a block's first token is predicted by the commit of the block before": shifted,
        "all blocks of a canvas (dllm.blocks) share a commit already": settings.blocks > 1,
        "the model's commits and steps have different masks": not in_place,
        # The first stage would have to know which tokens of a block it has to read again.
        "there are pipeline stages, and scheduling is synchronous": not window
        and vllm_config.parallel_config.pipeline_parallel_size > 1,
        "skip_last_commit is off": not settings.skip_last_commit,
        f"a step has room for {budget} tokens only": budget < window,
        "the context holds one block only": vllm_config.model_config.max_model_len < window,
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def _by_cost(vllm_config: VllmConfig, length: int) -> tuple[str, str]:
    """Read two blocks if weights dominate a pass, so that the second block is nearly free."""
    from vllm.platforms import current_platform

    if vllm_config.model_config.is_moe:
        return SEPARATE, "each token more would read experts of its own"
    free = FREE_TOKENS_CPU if current_platform.is_cpu() else FREE_TOKENS_GPU
    seats = vllm_config.scheduler_config.max_num_seqs
    tokens = f"{seats} requests x {2 * length} tokens"
    if seats * 2 * length > free:
        return (
            SEPARATE,
            f"a step of up to {tokens} would be more than the {free} that are nearly free; set "
            f"--max-num-seqs {free // (2 * length)} or dllm.fused_commit=on to fuse them"
            if free >= 2 * length
            else f"{2 * length} tokens are more than the {free} that are nearly free",
        )
    return TWO_BLOCKS, f"{tokens} are nearly free"
