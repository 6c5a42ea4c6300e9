"""DiffusionGemma: canvases of random tokens after a causal prompt, with self-conditioning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_dllm.decoding import Corruption
from vllm_dllm.families.base import Family
from vllm_dllm.settings.server import native_gemma

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.attention.metadata import AttentionRule
    from vllm_dllm.engine.slots import SlotState
    from vllm_dllm.families.diffusion_gemma.input_embeddings import InputEmbeddings
    from vllm_dllm.settings.resolution import Served


class DiffusionGemma(Family):
    """google/diffusiongemma-*: the denoise pass is self-conditioned, the commit is not."""

    architecture: ClassVar[str] = "DiffusionGemmaForBlockDiffusion"
    corruption: ClassVar[Corruption] = "uniform"
    algorithm: ClassVar[str] = "EntropyBound"
    aligned: ClassVar[bool] = False
    commits_in_place: ClassVar[bool] = False
    self_conditioned: ClassVar[bool] = True

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`; for vLLM's own class, this only checks the checkpoint."""
        from vllm_dllm.families.diffusion_gemma import engine_config

        if native_gemma():
            engine_config.check_checkpoint(vllm_config, self)
        else:
            engine_config.configure(vllm_config, self)

    def checkpoint_settings(self, generation_config: Mapping[str, Any]) -> Mapping[str, float]:
        """See `Family.checkpoint_settings`."""
        from vllm_dllm.families.diffusion_gemma.engine_config import parse_sampler

        return parse_sampler(generation_config)

    def attention(self, served: Served, slots: SlotState, own_backend: bool) -> AttentionRule:
        """See `Family.attention`."""
        from vllm_dllm.families.diffusion_gemma import attention
        from vllm_dllm.ops.attention.masks import WindowRule

        if own_backend:
            window = WindowRule[served.settings.window.upper()]
            return attention.causal_unless_denoised_rules(slots, window)
        return attention.CausalUnlessDenoised(slots)

    def embeddings(self, state: Any) -> InputEmbeddings:
        """See `Family.embeddings`: tokens, images, and the last prediction."""
        from vllm_dllm.families.diffusion_gemma.input_embeddings import InputEmbeddings
        from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning

        hidden = state.model_config.hf_text_config.hidden_size
        scale = state.model.model.normalizer
        module = state.model.self_conditioning
        return InputEmbeddings(state, SelfConditioning(state.slots, hidden, module, scale))

    def scheduler(self, asynchronous: bool) -> type[DiffusionScheduler]:
        """See `Family.scheduler`."""
        from vllm_dllm.families.diffusion_gemma import scheduler

        return scheduler.AsyncCanvasScheduler if asynchronous else scheduler.CanvasScheduler
