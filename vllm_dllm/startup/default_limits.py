"""Choose default limits for requests and tokens that the user did not set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_dllm.settings.server import LENGTH

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.dllm")

# The most requests that run at a time by default. With more of them each step would take longer
# than the additional requests are worth; vLLM's default for large GPUs, 1024, is meant for steps of
# one token per request.
MOST_SEATS = 256
MOST_SEATS_SELF_CONDITIONED = 64
# The share of the device's memory that the canvases of all running requests may take.
CANVAS_SHARE = 0.05
# A rule of thumb for how many tensors of the hidden size are alive at the same time for one
# position in a forward pass: residual, norms, queries, keys, values, the inputs and outputs of the
# MLP and of the experts.
FORWARD_COPIES = 16


def canvas_bytes(length: int, hidden: int, itemsize: int) -> int:
    """Bytes that one more running request of a self-conditioned model adds to a step's memory.

    They hold the request's soft embedding, a float32 copy of it while it is computed, and the
    request's part of the forward pass. Logits are not counted, because only one tile of them exists
    at a time for all requests together.

    Args:
        length: length of a canvas, in tokens.
        hidden: the model's hidden size.
        itemsize: bytes of an element of the model's dtype.
    """
    return length * hidden * (itemsize + 4 + FORWARD_COPIES * itemsize)


def default_seats(total_memory: int, per_request: int, stock: int) -> int:
    """How many requests may run at a time if the user did not set the number.

    Args:
        total_memory: bytes of the device's memory.
        per_request: bytes that one request adds to a step, see `canvas_bytes`.
        stock: vLLM's own default.

    Returns:
        The lower of vLLM's default and the number that `CANVAS_SHARE` of the memory holds; at
        least 1.
    """
    return max(1, min(stock, int(total_memory * CANVAS_SHARE) // per_request))


def choose_seats(model_config: ModelConfig, length: int, stock: int) -> int:
    """Choose and log ``max_num_seqs`` for a self-conditioned model if the user gave none.

    Args:
        model_config: the model's configuration.
        length: length of a canvas, in tokens.
        stock: the highest default.
    """
    from vllm.platforms import current_platform

    total = current_platform.get_device_total_memory()
    per_request = canvas_bytes(length, model_config.get_hidden_size(), model_config.dtype.itemsize)
    seats = default_seats(total, per_request, stock)
    logger.info(
        "dllm: max_num_seqs=%d: the lower of %d and %.0f %% of %.1f GiB divided by "
        "%.2f MiB a request (canvas of %d x hidden %d); set --max-num-seqs to choose",
        seats,
        stock,
        100 * CANVAS_SHARE,
        total / 2**30,
        per_request / 2**20,
        length,
        model_config.get_hidden_size(),
    )
    return seats


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
    if not given[0] and self_conditioned:
        most = min(args.max_num_seqs, MOST_SEATS_SELF_CONDITIONED)
        args.max_num_seqs = choose_seats(model_config, length, most)
    elif not given[0] and args.max_num_seqs > MOST_SEATS:
        logger.info(
            "dllm: max_num_seqs=%d instead of vLLM's %d: a step denoises a canvas of %d tokens for "
            "each request; set --max-num-seqs to choose",
            MOST_SEATS,
            args.max_num_seqs,
            length,
        )
        args.max_num_seqs = MOST_SEATS
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
