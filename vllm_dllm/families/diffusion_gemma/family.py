"""DiffusionGemma: canvases of random tokens after a causal prompt, with self-conditioning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.model_executor.models.config import DiffusionGemmaModelForBlockDiffusionConfig

from vllm_dllm.attention.routes import LayerShape
from vllm_dllm.decoding import Corruption
from vllm_dllm.families.base import Family
from vllm_dllm.families.config_fields import Fields, canvas_length, check_fields
from vllm_dllm.families.served import configure_engine, generation_settings
from vllm_dllm.ranges import SettingsError, listed, shown
from vllm_dllm.settings.resolution import (
    BOUND,
    MAX_STEPS_FIELD,
    OVERRIDE,
    SAMPLER,
    SAMPLER_FIELDS,
    Served,
)
from vllm_dllm.settings.server import DllmSettings, native_gemma

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.families.vision.embeddings import InputEmbeddings

SAMPLER_CLASS = "EntropyBoundSamplerConfig"


class DiffusionGemma(Family):
    """google/diffusiongemma-*: the denoise pass is self-conditioned, the commit is not."""

    architecture: ClassVar[str] = "DiffusionGemmaForBlockDiffusion"
    corruption: ClassVar[Corruption] = "uniform"
    algorithm: ClassVar[str] = "EntropyBound"
    aligned: ClassVar[bool] = False
    self_conditioned: ClassVar[bool] = True
    one_stage: ClassVar[str] = (
        "vLLM's DiffusionGemma has no stages, and the first would need what the last one predicted"
    )

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`; for vLLM's own class, this only checks the checkpoint."""
        if native_gemma():
            self._check_native(vllm_config)
            _configure_as_vllm(vllm_config)
            return
        model = vllm_config.model_config
        check_fields(model, ignored_fields)
        seats = vllm_config.scheduler_config.max_num_seqs
        chosen = vllm_config.attention_config.backend
        _configure_as_vllm(vllm_config)
        # What vLLM has chosen for its own class, which holds whole rows of logits, does not apply.
        vllm_config.attention_config.backend = chosen
        vllm_config.scheduler_config.max_num_seqs = seats
        configure_engine(vllm_config, self, layer_shapes(vllm_config))

    def _check_native(self, vllm_config: VllmConfig) -> None:
        stated, elsewhere = generation_settings(vllm_config, self)
        Served(
            self.corruption, self.algorithm, DllmSettings(), stated, elsewhere=elsewhere
        ).choose()
        if OVERRIDE in elsewhere.values():
            names = sorted(name for name, source in elsewhere.items() if source == OVERRIDE)
            raise SettingsError(
                f"{OVERRIDE}: vLLM's own class (VLLM_DLLM_NATIVE=1) does not read {listed(names)} "
                "from there; write a generation_config.json, and name its folder with "
                "--generation-config"
            )

    def checkpoint_settings(self, generation_config: Mapping[str, Any]) -> Mapping[str, float]:
        """See `Family.checkpoint_settings`: the sampler's settings and ``max_denoising_steps``."""
        sampler = generation_config.get(SAMPLER)
        if not isinstance(sampler, Mapping):
            raise SettingsError(f"generation_config.json has no {SAMPLER!r}")
        if sampler.get("_cls_name") != SAMPLER_CLASS:
            raise SettingsError(
                f"generation_config.json: {SAMPLER}._cls_name must be {SAMPLER_CLASS!r}, got "
                f"{shown(sampler.get('_cls_name'))}"
            )
        values: dict[str, Any] = {
            name: generation_config.get(name) for name in (MAX_STEPS_FIELD, *SAMPLER_FIELDS)
        }
        values[f"{SAMPLER}.{BOUND}"] = sampler.get(BOUND)
        for name, value in values.items():
            if value is None:
                raise SettingsError(f"generation_config.json has no {name!r}")
        return {name.removeprefix(f"{SAMPLER}."): value for name, value in values.items()}

    def embeddings(self, state: Any) -> InputEmbeddings:
        """See `Family.embeddings`."""
        from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning
        from vllm_dllm.families.vision.embeddings import InputEmbeddings

        hidden = state.model_config.hf_text_config.hidden_size
        scale = state.model.model.normalizer
        module = state.model.self_conditioning
        return InputEmbeddings(state, SelfConditioning(state.slots, hidden, module, scale))

    def scheduler(self) -> type[DiffusionScheduler]:
        """See `Family.scheduler`."""
        from vllm_dllm.families.anchored.scheduler import CanvasScheduler

        return CanvasScheduler


def _configure_as_vllm(vllm_config: VllmConfig) -> None:
    """Run vLLM's own start-up of DiffusionGemma, with the canvas length that is given."""
    # Without one, transformers would silently use 256.
    length = canvas_length(vllm_config)
    DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)
    # `--diffusion-config` may set other options and leave the length to the checkpoint.
    vllm_config.diffusion_config.canvas_length = length


def ignored_fields(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """`Fields.ignored` of DiffusionGemma, whose text and vision fields are in separate objects."""
    from transformers import DiffusionGemmaConfig

    config = DiffusionGemmaConfig(text_config={}, vision_config={})
    parts = {
        "text_config": Fields(
            type(config.text_config),
            # Read by vLLM's backbone.
            frozenset(
                {"attention_k_eq_v", "attn_logit_softcapping", "final_logit_softcapping"}
                | {"global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers"}
                | {"per_layer_config", "self_conditioning_size", "use_double_wide_mlp", "is_causal"}
            ),
            {
                "use_bidirectional_attention": (
                    (None, "vision"),
                    "prompts that are read in both directions",
                )
            },
        ),
        # vLLM reads how many tokens an image has.
        "vision_config": Fields(type(config.vision_config), frozenset({"default_output_length"})),
    }
    return Fields(type(config), parts=parts).ignored(stated, overrides)


def layer_shapes(vllm_config: VllmConfig) -> tuple[LayerShape, ...]:
    """The different shapes of the model's attention layers, as its checkpoint states them."""
    model = vllm_config.model_config
    text = model.hf_text_config
    shapes = [
        LayerShape(
            model.model_arch_config[layer].head_size,
            text.sliding_window if kind == "sliding_attention" else None,
        )
        for layer, kind in enumerate(text.layer_types)
    ]
    return tuple(dict.fromkeys(shapes))
