"""How a canvas sees sliding-window layers, and which attention can compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


def check_window(window: str) -> None:
    """Refuse at start-up a rule that this platform's attention cannot express.

    Raises:
        ValueError: names the backend that can.
    """
    from vllm.platforms import current_platform

    if window == "reference" and not current_platform.is_cpu():
        raise ValueError(
            "dllm.window=reference: no attention backend of this platform has one left edge for "
            "a whole canvas; CPU_ATTN has it. Use window=symmetric (the default, as vLLM does)"
        )


def apply_window(vllm_config: VllmConfig, window: str) -> None:
    """Set the model's layers to the rule; one log line says where it went."""
    if window == "symmetric":
        return
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    from vllm_dllm.cpu.reference_window import use_reference_window

    names = use_reference_window(get_layers_from_vllm_config(vllm_config, Attention))
    logger.info("dllm: window=reference on %d sliding-window layers (CPU_ATTN)", len(names))
