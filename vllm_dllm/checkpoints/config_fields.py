"""Classifies the fields of a checkpoint's ``config.json``: read, refused, ignored, or unknown.

Silently ignoring a field may change a model's answers, so each field is either known to be read,
refused by name, known not to matter, or named in a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from vllm_dllm.ranges import SettingsError, shown

# LLaDA2: values that ask for nothing unsupported, and what other values would ask for.
LLADA2_ONLY: Mapping[str, tuple[Collection[Any], str]] = {
    "expert_capacity": ((None, 0), "experts chosen for whole blocks (LLaDA2.2)"),
    "delete_token_id": ((None,), "tokens that are deleted from a canvas (LLaDA2.2)"),
    "split_token_id": ((None,), "tokens that are inserted into a canvas (LLaDA2.2)"),
    "norm_softmax": ((None, False), "a normalised softmax"),
    "using_split_qkv_in_self_attention": (
        (None, False),
        "query, key and value in matrices of their own",
    ),
    "use_rmsnorm": ((None, True), "layer norm"),
}
# Training, caching and dropout, and a window that the authors' code states but never applies.
LLADA2_INERT = frozenset(
    {"attention_dropout", "embedding_dropout", "output_dropout", "initializer_range", "use_cache"}
    | {"max_window_layers", "sliding_window", "use_sliding_window", "output_router_logits"}
    | {"router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"}
    | {"mtp_loss_scaling_factor", "moe_router_bias_update_rate"}
)
# DiffusionGemma's fields other than those that transformers' classes declare. They are read by
# vLLM's backbone or by those classes.
GEMMA_READ = frozenset(
    {"attention_k_eq_v", "attn_logit_softcapping", "final_logit_softcapping", "global_head_dim"}
    | {"num_global_key_value_heads", "num_kv_shared_layers", "per_layer_config"}
    | {"self_conditioning_size", "use_double_wide_mlp", "is_causal"}
)
# Of the vision tower, by vLLM: how many tokens an image has.
GEMMA_VISION_READ = frozenset({"default_output_length"})
GEMMA_ONLY: Mapping[str, tuple[Collection[Any], str]] = {
    "use_bidirectional_attention": ((None, "vision"), "prompts that are read in both directions"),
}
# SDAR: what vLLM's Qwen3 would ignore, or do in a way that does not fit a canvas.
SDAR_ONLY: Mapping[str, tuple[Collection[Any], str]] = {
    "use_regular_causal": ((None, False), "tokens that are read causally (I-DLM)"),
    "block_causal_prompt": ((None, True), "prompts that are read causally"),
    "is_causal": ((None, True), "attention without a cache"),
    "attention_bias": ((None, False), "a bias in each of the attention's projections"),
    "hidden_act": (("silu",), "another activation than SiLU"),
    "shared_expert_intermediate_size": ((None, 0), "a shared expert"),
    "dual_chunk_attention_config": ((None,), "attention by chunks of the context"),
}
# For every model: transformers' own attributes, options of loaders, and generation settings in
# older configurations.
_HOUSEKEEPING = (
    frozenset(vars(PretrainedConfig()))
    | frozenset(GenerationConfig().to_dict())
    | {"model_type", "auto_map", "torch_dtype", "tokenizer_class", "quantization_config"}
    | {"compression_config", "attn_implementation", "_attn_implementation", "_commit_hash"}
    | {"tie_word_embeddings", "tie_encoder_decoder", "is_decoder", "is_encoder_decoder", "prefix"}
    | {"add_cross_attention", "cross_attention_hidden_size", "pruned_heads", "torchscript"}
    | {"use_bfloat16", "tf_legacy_loss", "finetuning_task", "task_specific_params"}
    | {"output_attentions", "sep_token_id", "bad_words_ids", "unsloth_version", "name_or_path"}
)


def source_of(name: str, overrides: Mapping[str, Any]) -> str:
    """The source of a field: ``config.json`` or ``--hf-overrides``.

    Args:
        name: the field, with any fields that contain it (``text_config.x``).
        overrides: the value of ``--hf-overrides``.
    """
    found: Any = overrides
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return "config.json"
        found = found[part]
    return "--hf-overrides"


def check_only(
    name: str,
    value: object,
    table: Mapping[str, tuple[Collection[Any], str]],
    source: str = "config.json",
) -> None:
    """Raise `SettingsError` for a field that asks for something that is not supported.

    Args:
        name: the field, with any fields that contain it (``text_config.x``).
        value: the value in the checkpoint or an override.
        table: the values that ask for nothing, and what others would ask for.
        source: where the value comes from.
    """
    field = name.rpartition(".")[2]
    if field not in table:
        return
    taken, wanted = table[field]
    if not any(value is one or (type(value) is type(one) and value == one) for one in taken):
        raise SettingsError(
            f"{source}: {name}={shown(value)} asks for {wanted}, which is not supported"
        )


def unknown_fields(stated: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The unknown fields, in the file's order.

    Args:
        stated: ``config.json`` with ``--hf-overrides``.
        known: the fields that this model's classes read, or that do not matter to it.
    """
    return [name for name in stated if name not in known and name not in _HOUSEKEEPING]


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
            known |= GEMMA_READ
            for name, value in inner.items():
                field = f"{part}.{name}"
                check_only(field, value, GEMMA_ONLY, source_of(field, overrides))
        else:
            known |= GEMMA_VISION_READ
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
