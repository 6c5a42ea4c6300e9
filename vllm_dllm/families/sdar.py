"""SDAR, and TraDo and DiRL, which were trained from it: Qwen3, dense or with experts.

It has a block-causal mask and small blocks.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlavaOnevisionConfig, Qwen3Config, Qwen3MoeConfig, SiglipVisionConfig
from vllm.config import VllmConfig
from vllm.multimodal.processing import InputProcessingContext

from vllm_dllm.decoding.base import DrawConfidence
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, MaskedFields, stated_fields
from vllm_dllm.ranges import SettingsError

if TYPE_CHECKING:
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.families.vision.embeddings import InputEmbeddings


@strict
class SDARConfig(MaskedFields, Qwen3Config):
    """``model_type: sdar``."""

    model_type = "sdar"
    usual_length: ClassVar[int | None] = 4


@strict
class SDARMoeConfig(MaskedFields, Qwen3MoeConfig):
    """``model_type: sdar_moe``."""

    model_type = "sdar_moe"
    usual_length: ClassVar[int | None] = 4
    # Qwen3-MoE's class reads it without declaring it.
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


FIELDS = Fields(
    SDARConfig,
    # Fields that only training uses, one for a window that is never applied, and what vLLM reads.
    frozenset(
        {"fuse_cross_entropy", "debug", "ep_size", "micro_forward", "use_deepep", "skip_checkpoint"}
        | {"max_window_layers", "rope_theta", "rope_scaling"}
    ),
    # What vLLM's Qwen3 would ignore, or do in a way that does not fit a canvas. I-DLM's checkpoints
    # have SDAR's ``model_type`` and are recognised by such a field.
    {
        "use_regular_causal": ((None, False), "tokens that are read causally (I-DLM)"),
        "block_causal_prompt": ((None, True), "prompts that are read causally"),
        "is_causal": ((None, True), "attention without a cache"),
        "attention_bias": ((None, False), "a bias in each of the attention's projections"),
        "hidden_act": (("silu",), "another activation than SiLU"),
        "shared_expert_intermediate_size": ((None, 0), "a shared expert"),
        "dual_chunk_attention_config": ((None,), "attention by chunks of the context"),
    },
)


class SDAR(BlockCausalFamily):
    """SDAR's dense models, TraDo and DiRL."""

    architecture: ClassVar[str] = "SDARForCausalLM"
    algorithm: ClassVar[str] = "LowConfidenceDynamic"
    several_blocks: ClassVar[bool] = True
    fields: ClassVar[Fields] = FIELDS
    mask_spellings: ClassVar[tuple[str, ...]] = ("<|MASK|>", "<MASK>")
    samples: ClassVar[bool] = True

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        model = vllm_config.model_config
        named = length_of_name(model.model)
        if named is not None and not {"block_size", "canvas_length"} & stated_fields(model).keys():
            model.hf_config.canvas_length = named
        super().configure(vllm_config)


class SDARMoe(SDAR):
    """SDAR's models with experts."""

    architecture: ClassVar[str] = "SDARMoeForCausalLM"
    fields: ClassVar[Fields] = replace(FIELDS, config_class=SDARMoeConfig)


def length_of_name(model: str) -> int | None:
    """L from the name of a published checkpoint, such as ``SDAR-4B-Chat-b16``, or None."""
    found = re.findall(r"-b(4|8|16|32|64)(?=[-/]|$)", model)
    return int(found[-1]) if found else None


# Checkpoints state the architecture of LLaVA-OneVision, which vLLM serves itself.
ARCHITECTURE = "SDARVForConditionalGeneration"


@strict
class SDARVConfig(LlavaOnevisionConfig):
    """``model_type: sdar_v``; block length and mask are those in ``text_config``."""

    model_type = "sdar_v"

    text_config: Any = None
    canvas_length: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        text = self.text_config or {}
        if isinstance(text, dict):
            # vLLM's class for pictures makes a model of the text, which it knows as Qwen3.
            text = self.text_config = SDARConfig(**text | {"architectures": ["Qwen3ForCausalLM"]})
        # By its length vLLM recognises a diffusion model.
        self.canvas_length = self.canvas_length or text.canvas_length
        text.canvas_length = None
        kwargs.pop("attn_implementation", None)
        super().__post_init__(**kwargs)
        self.architectures = [ARCHITECTURE]


class OneVisionConfig(LlavaOnevisionConfig):
    """``model_type: llava_onevision``: makes an `SDARVConfig` if the text model is SDAR."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See the class of transformers, which other models get."""
        if (config_dict.get("text_config") or {}).get("model_type") != SDARConfig.model_type:
            return LlavaOnevisionConfig.from_dict(config_dict, **kwargs)
        return SDARVConfig.from_dict(config_dict | {"model_type": SDARVConfig.model_type}, **kwargs)


class SDARVL(SDAR):
    """JetLM/SDAR-VL-*: a prompt may end within a picture, whose rest is in the first canvas."""

    architecture: ClassVar[str] = ARCHITECTURE
    draw_confidence: ClassVar[DrawConfidence | None] = "tempered"
    several_blocks: ClassVar[bool] = False
    one_stage: ClassVar[str] = "it is not supported for models that read pictures"
    fields: ClassVar[Fields] = Fields(
        SDARVConfig,
        frozenset({"hidden_size", "ignore_index", "block_size", "block_length"}),
        {
            "vision_feature_layer": ((None, -1), "another layer's features"),
            "vision_feature_select_strategy": ((None, "full"), "a part of the features"),
            "vision_aspect_ratio": ((None, "anyres_max_9"), "pictures that are cut in another way"),
            "use_image_newline_parameter": ((None, True), "rows without an end"),
        },
        {
            "text_config": FIELDS,
            "vision_config": Fields(SiglipVisionConfig, frozenset({"vision_use_head"})),
        },
    )

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`; the text's configuration has the mask and the block length.

        `SDAR.configure` would take the length from a checkpoint's name, because it looks for the
        file's in the outer configuration.
        """
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        config = model.hf_config
        if config.mask_token_id is None:
            config.mask_token_id = config.text_config.mask_token_id
        BlockCausalFamily.configure(self, vllm_config)
        if scheduler.disable_chunked_mm_input:
            raise SettingsError(
                "--disable-chunked-mm-input: chunks end where blocks do, which may be within a "
                "picture; remove it"
            )
        from vllm_dllm.families.vision.models import AnyresInfo

        # A block may need the end of one picture and the start of the next.
        most = AnyresInfo(InputProcessingContext(model, None)).get_max_image_tokens()
        two = 2 * most + config.canvas_length
        scheduler.max_num_encoder_input_tokens = max(scheduler.max_num_encoder_input_tokens, two)
        scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, two)

    def embeddings(self, state: Any) -> "InputEmbeddings | None":
        """See `Family.embeddings`."""
        from vllm_dllm.families.vision.embeddings import InputEmbeddings, Tails

        if not state.supports_mm_inputs:
            return None
        tails = Tails(state.slots, state.inputs_embeds_size, state.dtype)
        return InputEmbeddings(state, tails=tails)

    def scheduler(self) -> "type[DiffusionScheduler]":
        """See `Family.scheduler`."""
        from vllm_dllm.families.vision.scheduler import PictureBlockScheduler

        return PictureBlockScheduler
