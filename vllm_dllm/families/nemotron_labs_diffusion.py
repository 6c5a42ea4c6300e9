"""Nemotron-Labs-Diffusion: canvases of masks after a causal prompt, and a causal commit."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Ministral3Config, PixtralVisionConfig
from vllm.config import ModelConfig

from vllm_dllm.decoding.base import Beside
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, MaskedFields

if TYPE_CHECKING:
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.families.vision.embeddings import InputEmbeddings


@strict
class NemotronLabsDiffusionConfig(MaskedFields, Ministral3Config):
    """``model_type: nemotron_labs_diffusion``.

    Attributes:
        llama_4_scaling: how queries grow with their position, as vLLM's Mistral reads it.
    """

    model_type = "nemotron_labs_diffusion"

    llama_4_scaling: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.complete()

    def complete(self) -> None:
        """State for vLLM what the rope parameters imply.

        YaRN's attention factor is 1, because ``mscale`` and ``mscale_all_dim`` are equal; vLLM
        would multiply by a factor of its own where a checkpoint leaves one of them out.
        """
        rope: dict[str, Any] = self.rope_parameters or {}
        if rope.get("rope_type") == "yarn":
            rope["attention_factor"] = 1.0
        beta = rope.get("llama_4_scaling_beta")
        self.llama_4_scaling = beta and {
            "beta": beta,
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        }


@strict
class MinistralDLMConfig(NemotronLabsDiffusionConfig):
    """``model_type: ministral_dlm``, as older checkpoints call it."""

    model_type = "ministral_dlm"


@strict
class NemotronLabsDiffusionVLMConfig(NemotronLabsDiffusionConfig):
    """``model_type: nemotron_labs_diffusion_vlm``; the fields of the text are not in an object."""

    model_type = "nemotron_labs_diffusion_vlm"
    sub_configs: ClassVar[dict[str, type]] = {"vision_config": PixtralVisionConfig}
    # No constrained output may have one.
    boi_token_id: ClassVar[int] = 18
    image_token_id: ClassVar[int] = 19
    eoi_token_id: ClassVar[int] = 21

    vision_config: Any = None
    spatial_merge_size: int = 2
    vision_feature_layer: int = -1
    multimodal_projector_bias: bool = False
    projector_hidden_act: str = "gelu"

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.vision_config, PixtralVisionConfig):
            self.vision_config = PixtralVisionConfig(**(self.vision_config or {}))
        super().__post_init__(**kwargs)

    @property
    def text_config(self) -> NemotronLabsDiffusionConfig:
        """The text's configuration as vLLM's class for pictures wants it, of an ordinary model."""
        names = (field.name for field in fields(NemotronLabsDiffusionConfig))
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        text = NemotronLabsDiffusionConfig(**given | {"architectures": ["MistralForCausalLM"]})
        text.canvas_length = None
        return text


FIELDS = Fields(
    NemotronLabsDiffusionConfig,
    # Fields that only training uses, and what transformers reads.
    frozenset(
        {"dlm_loss_weight", "ar_loss_weight", "dp_varying_mask_ratio", "rope_theta"}
        | {"rope_scaling"}
    ),
    {
        "dlm_paradigm": ((None, "bidirectional"), "canvases that are read in another way"),
        "ar_mode": ((None, False), "token by token decoding, which LinearSpec does faster"),
        "attention_bias": ((None, False), "a bias in each of the attention's projections"),
        "mlp_bias": ((None, False), "a bias in each of the MLP's projections"),
        "hidden_act": (("silu",), "another activation than SiLU"),
    },
)


class NemotronLabsDiffusion(BlockCausalFamily):
    """nvidia/Nemotron-Labs-Diffusion-*: the canvas alone is read in both directions."""

    architecture: ClassVar[str] = "NemotronLabsDiffusionModel"
    algorithm: ClassVar[str] = "ConfidenceThreshold"
    aligned: ClassVar[bool] = False
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

    def scheduler(self) -> "type[DiffusionScheduler]":
        """See `Family.scheduler`."""
        from vllm_dllm.families.anchored.scheduler import VerifiedCanvasScheduler

        return VerifiedCanvasScheduler


class MinistralDiffEncoder(NemotronLabsDiffusion):
    """Older checkpoints of the same model."""

    architecture: ClassVar[str] = "MinistralDiffEncoderModel"


class NemotronVLM(NemotronLabsDiffusion):
    """nvidia/Nemotron-Labs-Diffusion-VLM-8B: features of pictures are in the prompt only."""

    architecture: ClassVar[str] = "NemotronLabsDiffusionVLMModel"
    fields: ClassVar[Fields] = Fields(
        NemotronLabsDiffusionVLMConfig,
        FIELDS.also | {"dlm_type"},
        {**FIELDS.supported, "vision_feature_layer": ((None, -1), "another layer's features")},
        {"vision_config": Fields(PixtralVisionConfig, frozenset({"rope_theta", "head_dim"}))},
    )

    def embeddings(self, state: Any) -> "InputEmbeddings | None":
        """See `Family.embeddings`."""
        from vllm_dllm.families.vision.embeddings import InputEmbeddings

        return InputEmbeddings(state) if state.supports_mm_inputs else None
