"""The family of masked models with a block-causal mask; a subclass names the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_dllm.decoding import Corruption
from vllm_dllm.families.base import Family

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.attention.metadata import AttentionRule
    from vllm_dllm.engine.slots import SlotState
    from vllm_dllm.settings.resolution import Served


class BlockCausalFamily(Family):
    """A position sees its whole block and everything before it; canvases start as masks.

    The model class has `MaskedCanvasModel` among its bases. ``config.json`` states
    ``canvas_length`` (by which vLLM recognises a diffusion model) and ``mask_token_id``, or the
    tokenizer has a mask token.

    Attributes:
        mask_spellings: texts by which the mask is found if the tokenizer does not declare it.
        samples: requests are sampled as ``generation_config.json`` recommends; otherwise they are
            greedy unless they ask for a temperature.
    """

    corruption: ClassVar[Corruption] = "mask"
    algorithm: ClassVar[str] = "LowConfidence"
    aligned: ClassVar[bool] = True
    commits_in_place: ClassVar[bool] = True
    mask_spellings: ClassVar[tuple[str, ...]] = ("<|mask|>",)
    samples: ClassVar[bool] = False

    def unread_fields(self, vllm_config: VllmConfig) -> list[str]:
        """Fields of ``config.json`` that are ignored; a warning at start-up names them."""
        return []

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        from vllm_dllm.families.block_causal.engine_config import configure

        configure(vllm_config, self, self.unread_fields(vllm_config))

    def checkpoint_settings(self, generation_config: Mapping[str, Any]) -> Mapping[str, float]:
        """See `Family.checkpoint_settings`: an algorithm reads the settings that it has."""
        return generation_config

    def mask_token(self, vllm_config: VllmConfig) -> int | None:
        """See `Family.mask_token`; `configure` determines it."""
        token: int = vllm_config.model_config.hf_config.mask_token_id
        return token

    def attention(self, served: Served, slots: SlotState, own_backend: bool) -> AttentionRule:
        """See `Family.attention`."""
        from vllm_dllm.families.block_causal import attention

        if own_backend:
            return attention.block_causal_rules(slots)
        windows = len(slots.phase) if served.two_blocks else 0
        return attention.BlockCausal(served.length, slots.device, windows)

    def scheduler(self, asynchronous: bool) -> type[DiffusionScheduler]:
        """See `Family.scheduler`."""
        from vllm_dllm.families.block_causal import scheduler

        if asynchronous:
            return scheduler.AsyncBlockDiffusionScheduler
        return scheduler.BlockDiffusionScheduler
