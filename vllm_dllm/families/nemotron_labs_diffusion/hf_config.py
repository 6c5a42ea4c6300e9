"""The configuration classes of Nemotron-Labs-Diffusion, so that no ``trust_remote_code`` is needed.

They inherit from Ministral 3's class, whose backbone it is.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Ministral3Config

from vllm_dllm.families.config_fields import Fields
from vllm_dllm.settings.server import DEFAULT_BLOCK_LENGTH


# `strict` needs annotations that are evaluated.
@strict
class NemotronLabsDiffusionConfig(Ministral3Config):
    """``model_type: nemotron_labs_diffusion``; Ministral 3's fields, and those of a masked model.

    Attributes:
        block_size: the length of a block, or None if the checkpoint does not state it.
        mask_token_id: the token of an undecided position, or None if it is the usual one.
        canvas_length: the block length again. vLLM treats a model that states it as a diffusion
            model.
        llama_4_scaling: how queries grow with their position, as vLLM's Mistral reads it.
    """

    model_type = "nemotron_labs_diffusion"

    block_size: int | None = None
    mask_token_id: int | None = None
    canvas_length: int | None = None
    llama_4_scaling: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Checkpoints name the attention used in training here, and transformers would select it.
        kwargs.pop("attn_implementation", None)
        self.canvas_length = self.canvas_length or self.block_size or DEFAULT_BLOCK_LENGTH
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
