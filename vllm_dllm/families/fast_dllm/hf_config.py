"""The configuration class of Fast-dLLM v2, so that no ``trust_remote_code`` is needed."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config

from vllm_dllm.settings.server import DEFAULT_BLOCK_LENGTH


# `strict` needs annotations that are evaluated.
@strict
class FastDLLMConfig(Qwen2Config):
    """``model_type: Fast_dLLM_Qwen``; Qwen2's fields, and those of a masked model.

    Attributes:
        bd_size: the length of a block.
        mask_token_id: the token of an undecided position, which published files leave out.
        canvas_length: the block length again. vLLM treats a model that states it as a diffusion
            model.
    """

    model_type = "Fast_dLLM_Qwen"

    bd_size: int | None = None
    mask_token_id: int | None = None
    canvas_length: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Files may name the attention used in training here, and transformers would select it.
        kwargs.pop("attn_implementation", None)
        self.canvas_length = self.canvas_length or self.bd_size or DEFAULT_BLOCK_LENGTH
        super().__post_init__(**kwargs)
