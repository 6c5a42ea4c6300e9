"""SDAR: Qwen3, dense or with experts, with a block-causal mask and small blocks."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import hf_overrides, stated_fields, unknown_fields
from vllm_dllm.families.sdar.hf_config import (
    INERT_FIELDS,
    SUPPORTED,
    SDARConfig,
    SDARMoeConfig,
    check_fields,
    length_of_name,
)
from vllm_dllm.startup.checks import check_quantization

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SDAR(BlockCausalFamily):
    """SDAR's dense models, TraDo and DiRL."""

    architecture: ClassVar[str] = "SDARForCausalLM"
    algorithm: ClassVar[str] = "LowConfidenceDynamic"
    mask_spellings: ClassVar[tuple[str, ...]] = ("<|MASK|>", "<MASK>")
    samples: ClassVar[bool] = True
    config_class: ClassVar[type[SDARConfig | SDARMoeConfig]] = SDARConfig

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`.

        Raises:
            SettingsError: a field asks for something that is not supported. I-DLM's checkpoints
                have SDAR's ``model_type`` and are recognised by such a field.
        """
        check_quantization(vllm_config)
        model_config = vllm_config.model_config
        check_fields(model_config.hf_config, hf_overrides(model_config))
        stated = stated_fields(model_config)
        named = length_of_name(model_config.model)
        if named is not None and not {"block_size", "canvas_length"} & stated.keys():
            model_config.hf_config.canvas_length = named
        super().configure(vllm_config)

    def unread_fields(self, vllm_config: VllmConfig) -> list[str]:
        """See `BlockCausalFamily.unread_fields`."""
        return unknown_fields(
            stated_fields(vllm_config.model_config), known_fields(self.config_class)
        )


def known_fields(config_class: type[SDARConfig | SDARMoeConfig]) -> frozenset[str]:
    """Every field of ``config.json`` that has a meaning here or is known to have none."""
    declared = frozenset(field.name for field in fields(config_class))
    return declared | INERT_FIELDS | SUPPORTED.keys() | {"rope_theta", "rope_scaling"}


class SDARMoe(SDAR):
    """SDAR's models with experts."""

    architecture: ClassVar[str] = "SDARMoeForCausalLM"
    config_class: ClassVar[type[SDARConfig | SDARMoeConfig]] = SDARMoeConfig
