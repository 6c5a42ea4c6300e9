"""The configuration classes of SDAR, so that no ``trust_remote_code`` is needed.

They inherit from Qwen3's classes rather than reuse them: a class that is registered under two names
would change its name in the whole process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from vllm_dllm.families.config_fields import SupportedValues, check_supported, source_of
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.server import LENGTH

DEFAULT_BLOCK_LENGTH = 4
# What vLLM's Qwen3 would ignore, or do in a way that does not fit a canvas.
SUPPORTED: SupportedValues = {
    "use_regular_causal": ((None, False), "tokens that are read causally (I-DLM)"),
    "block_causal_prompt": ((None, True), "prompts that are read causally"),
    "is_causal": ((None, True), "attention without a cache"),
    "attention_bias": ((None, False), "a bias in each of the attention's projections"),
    "hidden_act": (("silu",), "another activation than SiLU"),
    "shared_expert_intermediate_size": ((None, 0), "a shared expert"),
    "dual_chunk_attention_config": ((None,), "attention by chunks of the context"),
}
# Fields of ``config.json`` that only training uses, and one for a window that is never applied.
INERT_FIELDS = frozenset(
    {"fuse_cross_entropy", "debug", "ep_size", "micro_forward", "use_deepep", "skip_checkpoint"}
    | {"max_window_layers"}
)


class SDARConfig(Qwen3Config):
    """``model_type: sdar``; Qwen3's fields, and those of a masked model.

    Attributes:
        block_size: the length of a block, or None if the checkpoint does not state it.
        mask_token_id: the token of an undecided position, or None if the tokenizer has it.
        canvas_length: the block length again. vLLM treats a model that states it as a diffusion
            model.

    Raises:
        SettingsError: `block_size` or `canvas_length` is out of range, or they contradict.
    """

    model_type = "sdar"

    block_size: Any = None
    mask_token_id: Any = None
    canvas_length: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Checkpoints name the attention used in training here, and transformers would select it.
        kwargs.pop("attn_implementation", None)
        self.canvas_length = stated_length(self.block_size, self.canvas_length)
        super().__post_init__(**kwargs)


class SDARMoeConfig(Qwen3MoeConfig):
    """``model_type: sdar_moe``; see `SDARConfig`.

    Attributes:
        head_dim: the size of a head; Qwen3-MoE's class reads it without declaring it.
    """

    model_type = "sdar_moe"

    head_dim: Any = None
    block_size: Any = None
    mask_token_id: Any = None
    canvas_length: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("attn_implementation", None)
        self.canvas_length = stated_length(self.block_size, self.canvas_length)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


def check_fields(config: SDARConfig | SDARMoeConfig, overrides: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a field that asks for something that is not supported.

    Fields are not checked when they are set, because ``--hf-overrides`` may still set others.

    Args:
        config: the configuration, with `overrides` applied.
        overrides: the value of ``--hf-overrides``.
    """
    for name in SUPPORTED:
        check_supported(name, getattr(config, name, None), SUPPORTED, source_of(name, overrides))


def stated_length(block_size: Any, canvas_length: Any) -> int:
    """L from its two names in ``config.json``; SDAR's default if neither is stated.

    Raises:
        SettingsError: a length is out of range, or the two contradict each other.
    """
    names = {"block_size": block_size, "canvas_length": canvas_length}
    stated = {name: length for name, length in names.items() if length is not None}
    for name, length in stated.items():
        LENGTH.check(f"config.json: {name}", length)
    if len(set(stated.values())) > 1:
        raise SettingsError(
            f"config.json: block_size={block_size} contradicts canvas_length={canvas_length}; give "
            "one, or both the same"
        )
    return next(iter(stated.values()), DEFAULT_BLOCK_LENGTH)


def length_of_name(model: str) -> int | None:
    """L from the name of a published checkpoint, such as ``SDAR-4B-Chat-b16``, or None."""
    found = re.findall(r"-b(4|8|16|32|64)(?=[-/]|$)", model)
    return int(found[-1]) if found else None
