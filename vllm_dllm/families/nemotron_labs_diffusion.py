"""Nemotron-Labs-Diffusion: canvases of masks after a causal prompt, and a causal commit."""

from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Ministral3Config
from vllm.config import ModelConfig

from vllm_dllm.decoding.base import Beside
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, MaskedFields

if TYPE_CHECKING:
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler


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


class NemotronLabsDiffusionVLMConfig(NemotronLabsDiffusionConfig):
    """``model_type: nemotron_labs_diffusion_vlm``, which is refused."""

    model_type = "nemotron_labs_diffusion_vlm"

    def __post_init__(self, **kwargs: Any) -> None:
        raise ValueError(
            "nemotron_labs_diffusion_vlm: the variants of Nemotron-Labs-Diffusion that read "
            "pictures are not served; use a checkpoint for text (nemotron_labs_diffusion)"
        )


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
