"""Defaults for what the user did not say: requests at a time, and how long they have at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_dllm.settings.parsing import LENGTH

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.dllm")

# ``--shutdown-timeout``: running requests may take so many seconds to end.
DRAIN_SECONDS = 120
# Share of the device's memory that the canvases of all running requests may take.
CANVAS_SHARE = 0.05
# Tensors of a position's hidden size that are alive together in a forward pass, by rule of thumb:
# residual, norms, queries, keys, values, the MLP's and the experts' inputs and outputs.
FORWARD_COPIES = 16


class NotGiven(int):
    """A number that stands where the user gave none: vLLM's own default, told from an equal one."""


def canvas_bytes(length: int, hidden: int, itemsize: int) -> int:
    """What one more running request of a self-conditioned model adds to a step's memory.

    Its stored soft embedding, the same in float32 while it is computed, and its share of the
    forward pass. Logits do not count: they exist a tile at a time, for all requests together.
    """
    return length * hidden * (itemsize + 4 + FORWARD_COPIES * itemsize)


def default_seats(total_memory: int, per_request: int, stock: int) -> int:
    """Requests at a time: vLLM's own default, or fewer where memory says so; at least 1."""
    return max(1, min(stock, int(total_memory * CANVAS_SHARE) // per_request))


def choose_seats(model_config: ModelConfig, length: int, stock: int) -> int:
    """`max_num_seqs` for a self-conditioned model whose user gave none; logged."""
    from vllm.platforms import current_platform

    total = current_platform.get_device_total_memory()
    each = canvas_bytes(length, model_config.get_hidden_size(), model_config.dtype.itemsize)
    seats = default_seats(total, each, stock)
    logger.info(
        "dllm: max_num_seqs=%d: the lower of vLLM's default %d and %.0f %% of %.1f GiB divided by "
        "%.2f MiB a request (canvas of %d x hidden %d); set --max-num-seqs to choose",
        seats,
        stock,
        100 * CANVAS_SHARE,
        total / 2**30,
        each / 2**20,
        length,
        model_config.get_hidden_size(),
    )
    return seats


def set_defaults(args: Any, model_config: ModelConfig, given: tuple[bool, bool]) -> None:
    """Adjust vLLM's *defaults* in its engine arguments so that canvases fit.

    Args:
        args: vLLM's ``EngineArgs``, with its defaults filled in.
        model_config: one of our models.
        given: whether the user gave ``max_num_seqs``, and ``max_num_batched_tokens``.
    """
    chosen = (args.diffusion_config or {}).get("canvas_length")
    length = chosen or model_config.hf_config.canvas_length
    LENGTH.check("canvas_length", length)
    if not given[0] and hasattr(model_config.hf_config, "text_config"):
        args.max_num_seqs = choose_seats(model_config, length, args.max_num_seqs)
    needed = args.max_num_seqs * length
    if not given[1] and needed > args.max_num_batched_tokens:
        logger.info(
            "dllm: max_num_batched_tokens raised from %d to %d, so that %d canvases of %d tokens "
            "fit into one step",
            args.max_num_batched_tokens,
            needed,
            args.max_num_seqs,
            length,
        )
        args.max_num_batched_tokens = needed
