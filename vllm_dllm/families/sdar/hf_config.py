"""The configuration classes of SDAR, so that no ``trust_remote_code`` is needed.

They inherit from Qwen3's classes rather than reuse them: a class that is registered under two names
would change its name in the whole process.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config, Qwen3MoeConfig

DEFAULT_BLOCK_LENGTH = 4


# `strict` needs annotations that are evaluated.
@strict
class SDARConfig(Qwen3Config):
    """``model_type: sdar``; Qwen3's fields, and those of a masked model.

    Attributes:
        block_size: the length of a block, or None if the checkpoint does not state it.
        mask_token_id: the token of an undecided position, or None if the tokenizer has it.
        canvas_length: the block length again. vLLM treats a model that states it as a diffusion
            model.
    """

    model_type = "sdar"

    block_size: int | None = None
    mask_token_id: int | None = None
    canvas_length: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Checkpoints name the attention used in training here, and transformers would select it.
        kwargs.pop("attn_implementation", None)
        self.canvas_length = self.canvas_length or self.block_size or DEFAULT_BLOCK_LENGTH
        super().__post_init__(**kwargs)


@strict
class SDARMoeConfig(Qwen3MoeConfig):
    """``model_type: sdar_moe``; see `SDARConfig`.

    Attributes:
        head_dim: the size of a head; Qwen3-MoE's class reads it without declaring it.
    """

    model_type = "sdar_moe"

    head_dim: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    canvas_length: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("attn_implementation", None)
        self.canvas_length = self.canvas_length or self.block_size or DEFAULT_BLOCK_LENGTH
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
