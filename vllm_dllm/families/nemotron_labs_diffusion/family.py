"""Nemotron-Labs-Diffusion: canvases of masks after a causal prompt, and a causal commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_dllm.decoding.base import Beside
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields
from vllm_dllm.families.nemotron_labs_diffusion.hf_config import FIELDS

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.attention.metadata import AttentionRule
    from vllm_dllm.engine.slots import SlotState
    from vllm_dllm.settings.resolution import Served


class NemotronLabsDiffusion(BlockCausalFamily):
    """nvidia/Nemotron-Labs-Diffusion-*: the canvas alone is read in both directions."""

    architecture: ClassVar[str] = "NemotronLabsDiffusionModel"
    algorithm: ClassVar[str] = "ConfidenceThreshold"
    aligned: ClassVar[bool] = False
    commits_in_place: ClassVar[bool] = False
    verifies: ClassVar[bool] = True
    one_stage: ClassVar[str] = (
        "only the last stage would know whether a canvas is denoised or committed, which are read "
        "with different masks"
    )
    # A canvas that has been output in part would not end with the context, see `anchored`.
    excludes: ClassVar[frozenset[Beside]] = frozenset({"canvas_options"})
    fields: ClassVar[Fields] = FIELDS
    usual_mask_token: ClassVar[int] = 100

    def complete(self, model_config: ModelConfig) -> None:
        """See `Family.complete`; ``--hf-overrides`` may have changed what follows from others."""
        model_config.hf_config.complete()

    def attention(self, served: Served, slots: SlotState, own_backend: bool) -> AttentionRule:
        """See `Family.attention`."""
        from vllm_dllm.families.anchored import attention
        from vllm_dllm.ops.attention.masks import WindowRule

        if own_backend:
            return attention.causal_unless_denoised_rules(slots, WindowRule.SYMMETRIC)
        return attention.CausalUnlessDenoised(slots)

    def scheduler(self, asynchronous: bool) -> type[DiffusionScheduler]:
        """See `Family.scheduler`."""
        from vllm_dllm.families.anchored import scheduler

        if asynchronous:
            return scheduler.AsyncVerifiedCanvasScheduler
        return scheduler.VerifiedCanvasScheduler


class MinistralDiffEncoder(NemotronLabsDiffusion):
    """Older checkpoints of the same model."""

    architecture: ClassVar[str] = "MinistralDiffEncoderModel"
