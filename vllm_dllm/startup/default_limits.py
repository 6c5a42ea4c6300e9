"""Choose default limits for requests and tokens that the user did not set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_dllm.settings.server import LENGTH, SETTINGS_KEY

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.dllm")

# The most requests that run at a time by default. With more of them each step would take longer
# than the additional requests are worth; vLLM's default for large GPUs, 1024, is meant for steps of
# one token per request. A self-conditioned model also holds a soft embedding for each of them.
MOST_SEATS = 256
MOST_SEATS_SELF_CONDITIONED = 64


def set_defaults(
    args: Any, model_config: ModelConfig, given: tuple[bool, bool], self_conditioned: bool
) -> None:
    """Adjust vLLM's *defaults* in its engine arguments so that canvases fit.

    Args:
        args: vLLM's ``EngineArgs``, with its defaults filled in.
        model_config: the configuration of one of this package's models.
        given: whether the user gave ``max_num_seqs`` and whether the user gave
            ``max_num_batched_tokens``.
        self_conditioned: see `Family.self_conditioned`.

    Raises:
        SettingsError: the canvas length is out of range.
    """
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
            "dllm: max_num_seqs=%d instead of vLLM's %d: a step denoises a canvas of %d tokens for "
            "each request; set --max-num-seqs to choose",
            most,
            args.max_num_seqs,
            length,
        )
        args.max_num_seqs = most
    if not given[1] and args.max_num_seqs * length > args.max_num_batched_tokens:
        raise_budget(args, model_config, length)


def raise_budget(args: Any, model_config: ModelConfig, length: int) -> None:
    """Raise the token budget to one canvas per request, and keep the chunk size of prompts.

    A chunk of the whole budget would make every canvas of the step wait longer than it would with
    vLLM's own default.
    """
    from vllm.platforms import current_platform

    stock, needed = args.max_num_batched_tokens, args.max_num_seqs * length
    logger.info(
        "dllm: max_num_batched_tokens raised from %d to %d, so that %d canvases of %d tokens "
        "fit into one step",
        stock,
        needed,
        args.max_num_seqs,
        length,
    )
    args.max_num_batched_tokens = needed
    # vLLM refuses a threshold above the context length, which would have no effect anyway.
    limits_chunks = length <= stock < model_config.max_model_len
    if limits_chunks and not args.long_prefill_token_threshold and not current_platform.is_cpu():
        logger.info(
            "dllm: long_prefill_token_threshold=%d: beside other requests a prompt takes no more "
            "tokens of a step than by vLLM's default budget",
            stock,
        )
        args.long_prefill_token_threshold = stock
