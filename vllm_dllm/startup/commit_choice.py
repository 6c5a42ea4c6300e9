"""Choose when a finished block's keys and values are written, and log the reason.

There are three ways:

- *separate*: in a separate forward pass, after the block's last denoise step;
- *granted*: in the pass of the next block's first denoise step, for which the scheduler grants 2 L
  tokens. The scheduler must know a step's outcome before it plans the next one, so scheduling has
  to be synchronous;
- *two blocks*: in every denoise step of the next block, which always reads 2 L tokens. The
  scheduler need not know anything, so a step may be in flight.

The output is the same. `engine.model_state.read_again` and `engine.two_block_window` implement the
last two.
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
# Up to this many tokens of a step cost next to nothing compared with reading the weights. In
# bfloat16 a token takes as many operations as a weight matrix has bytes, so a GPU spends longer on
# reading than on computing up to its operations per second over its bytes per second: 156 tokens on
# an A100, 295 on an H100.
FREE_TOKENS_GPU = 128
# `benchmarks/sdar.py` measured that two blocks are still clearly faster with four requests.
FREE_TOKENS_CPU = 32


def choose_commits(
    vllm_config: VllmConfig,
    settings: DllmSettings,
    in_place: bool,
    length: int,
    shifted: bool = False,
) -> str:
    """Choose how blocks are committed, and log the reason.

    Args:
        vllm_config: vLLM's configuration.
        settings: the server's settings.
        in_place: see `Family.commits_in_place`.
        length: L, tokens of a block.
        shifted: see `Family.shifted`.

    Returns:
        `SEPARATE`, `GRANTED` or `TWO_BLOCKS`.

    Raises:
        SettingsError: ``dllm.fused_commit=on`` is impossible; the message has the reason.
    """
    way, reason = _chosen(vllm_config, settings, in_place, length, shifted)
    logger.info("dllm: blocks are committed %s (%s)", WORDS[way], reason)
    return way


def _chosen(
    vllm_config: VllmConfig,
    settings: DllmSettings,
    in_place: bool,
    length: int,
    shifted: bool,
) -> tuple[str, str]:
    """The way and the reason."""
    if settings.fused_commit == "off":
        return SEPARATE, "dllm.fused_commit=off"
    asynchronous = _will_be_asynchronous(vllm_config)
    obstacles = _obstacles(vllm_config, settings, in_place, length if asynchronous else 0)
    if shifted:
        obstacles.insert(0, "a block's first token is predicted by the commit of the block before")
    if settings.fused_commit == "on":
        if obstacles:
            raise SettingsError(f"dllm.fused_commit=on: impossible, because {obstacles[0]}")
        return TWO_BLOCKS if asynchronous else GRANTED, "dllm.fused_commit=on"
    if obstacles:
        return SEPARATE, obstacles[0]
    if not asynchronous:
        return GRANTED, "scheduling is synchronous"
    return _by_cost(vllm_config, length)


def _will_be_asynchronous(vllm_config: VllmConfig) -> bool:
    """Whether a step will be in flight while the next one is scheduled.

    vLLM decides this after a model's configuration hook has run: unless the user asked for either,
    it is off on the CPU and on elsewhere. A few executors cannot do it; a window of two blocks is
    correct there as well.
    """
    from vllm.platforms import current_platform

    asked = vllm_config.scheduler_config.async_scheduling
    return not current_platform.is_cpu() if asked is None else bool(asked)


def _obstacles(
    vllm_config: VllmConfig, settings: DllmSettings, in_place: bool, length: int
) -> list[str]:
    """List why commits cannot share a pass; `length` is 0 if scheduling is synchronous."""
    scheduler, window = vllm_config.scheduler_config, 2 * length
    budget = min(
        scheduler.max_num_batched_tokens,
        scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens,
    )
    obstacles = {
        "all blocks of a canvas (dllm.blocks) share a commit already": settings.blocks > 1,
        "the model's commits and steps have different masks": not in_place,
        # The first stage would have to know which tokens of a block it has to read again.
        "there are pipeline stages, and scheduling is synchronous": not length
        and vllm_config.parallel_config.pipeline_parallel_size > 1,
        "skip_last_commit is off": not settings.skip_last_commit,
        f"a step has room for {budget} tokens only": budget < window,
        "the context holds one block only": vllm_config.model_config.max_model_len < window,
    }
    return [reason for reason, holds in obstacles.items() if holds]


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
