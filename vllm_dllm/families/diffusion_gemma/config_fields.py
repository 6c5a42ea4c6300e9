"""Which fields of DiffusionGemma's ``config.json`` are read, refused or unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_dllm.families.config_fields import (
    SupportedValues,
    check_supported,
    source_of,
    unknown_fields,
)

# DiffusionGemma's fields other than those that transformers' classes declare. They are read by
# vLLM's backbone or by those classes.
TEXT_READ = frozenset(
    {"attention_k_eq_v", "attn_logit_softcapping", "final_logit_softcapping", "global_head_dim"}
    | {"num_global_key_value_heads", "num_kv_shared_layers", "per_layer_config"}
    | {"self_conditioning_size", "use_double_wide_mlp", "is_causal"}
)
# Of the vision tower, by vLLM: how many tokens an image has.
VISION_READ = frozenset({"default_output_length"})
SUPPORTED: SupportedValues = {
    "use_bidirectional_attention": ((None, "vision"), "prompts that are read in both directions"),
}


def unknown_gemma_fields(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """The unknown fields of DiffusionGemma, whose text and vision fields are in separate objects.

    Args:
        stated: ``config.json`` with ``--hf-overrides``.
        overrides: ``--hf-overrides`` alone.

    Raises:
        SettingsError: a field asks for something that is not supported.
    """
    from transformers import DiffusionGemmaConfig

    config = DiffusionGemmaConfig(text_config={}, vision_config={})
    unknown = unknown_fields(stated, declared(type(config)))
    for part in ("text_config", "vision_config"):
        inner = stated.get(part)
        if not isinstance(inner, Mapping):
            continue
        known = declared(type(getattr(config, part)))
        if part == "text_config":
            known |= TEXT_READ
            for name, value in inner.items():
                field = f"{part}.{name}"
                check_supported(field, value, SUPPORTED, source_of(field, overrides))
        else:
            known |= VISION_READ
        unknown += [f"{part}.{name}" for name in unknown_fields(inner, known)]
    return unknown


def declared(kind: type) -> set[str]:
    """The fields that a configuration class of transformers declares, by type or by default."""
    found: set[str] = set()
    for one in kind.__mro__:
        found.update(getattr(one, "__annotations__", {}))
        plain = (n for n, v in vars(one).items() if not isinstance(v, (Callable, property)))  # type: ignore[arg-type]
        found.update(name for name in plain if not name.startswith("__"))
    return found
