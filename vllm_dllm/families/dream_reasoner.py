"""DreamReasoner: Qwen3 with a block-causal mask and blocks of 32.

Source: ``generation_utils.py`` of Dream-org/DreamReasoner-8B, as ports quote it.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config
from vllm.config import ModelConfig

from vllm_dllm.decoding.base import DrawConfidence
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, MaskedFields
from vllm_dllm.families.sdar import FIELDS
from vllm_dllm.ranges import SettingsError


@strict
class DreamConfig(MaskedFields, Qwen3Config):
    """``model_type: Dream``, which Dream-7B and its relatives have, too.

    Their architecture is ``DreamModel``; they get DreamReasoner's, whose family refuses them.
    """

    model_type = "Dream"
    usual_length: ClassVar[int | None] = None
    # None is the share of a head in the hidden size.
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        self.architectures = [DreamReasoner.architecture]


class DreamReasoner(BlockCausalFamily):
    """DreamReasoner-8B, Base and the model that was trained to reason."""

    architecture: ClassVar[str] = "DreamForCausalLM"
    algorithm: ClassVar[str] = "LowConfidenceDynamic"
    several_blocks: ClassVar[bool] = True
    draw_confidence: ClassVar[DrawConfidence | None] = "filtered"
    # The authors' code fills a block in one step unless it is told otherwise.
    usual: ClassVar[Mapping[str, Mapping[str, float]]] = MappingProxyType(
        {"LowConfidenceStatic": {"steps": 1}}
    )
    end_tokens: ClassVar[tuple[int, ...]] = (151645, 151643)
    fields: ClassVar[Fields] = replace(FIELDS, config_class=DreamConfig)
    mask_spellings: ClassVar[tuple[str, ...]] = ("<|MASK|>", "<MASK>")
    usual_mask_token: ClassVar[int] = 151669

    def complete(self, model_config: ModelConfig) -> None:
        """See `Family.complete`; refuses models of this type that have no blocks."""
        if model_config.hf_config.canvas_length is None:
            raise SettingsError(
                f"config.json of {model_config.model} has model_type 'Dream' and no 'block_size': "
                "Dream-7B, Dream-Coder and DiffuCoder denoise the whole answer at once, which is "
                "not served; choose DreamReasoner"
            )
