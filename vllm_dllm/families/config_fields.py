"""The fields of ``config.json``: read as stated, refused, known to be inert, or named in a warning.

Silently ignoring a field may change a model's answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PretrainedConfig
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.decoding import Corruption
from vllm_dllm.ranges import SettingsError, listed, shown

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.dllm")

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
# For each field of a model, the values that ask for nothing, and what others would ask for.
SupportedValues = Mapping[str, tuple[Collection[Any], str]]


def hf_overrides(model_config: ModelConfig) -> dict[str, Any]:
    """The value of ``--hf-overrides``; empty if it is a function, which only Python can pass."""
    return model_config.hf_overrides if isinstance(model_config.hf_overrides, dict) else {}


def stated_fields(model_config: ModelConfig) -> dict[str, Any]:
    """The fields of ``config.json`` as written, overridden by ``--hf-overrides``."""
    stated = get_hf_file_to_dict("config.json", model_config.model, model_config.revision) or {}
    return merged(stated, hf_overrides(model_config))


def merged(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override as vLLM's ``--hf-overrides`` does: merge objects and replace everything else."""
    found = dict(stated)
    for name, value in overrides.items():
        below = found.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        found[name] = merged(below, value) if both else value  # type: ignore[arg-type]
    return found


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


def check_supported(
    name: str,
    value: object,
    table: SupportedValues,
    source: str = "config.json",
) -> None:
    """Raise `SettingsError` for a field that asks for something that is not supported.

    Args:
        name: the field, with any fields that contain it (``text_config.x``).
        value: the value in the checkpoint or an override.
        table: see `SupportedValues`.
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


def warn_of_unread_fields(
    model_config: ModelConfig, unread: Collection[str], corruption: Corruption
) -> None:
    """Warn about each name that would otherwise be ignored silently.

    Args:
        model_config: vLLM's configuration of the model.
        unread: fields of ``config.json`` with ``--hf-overrides`` that are ignored.
        corruption: see `Family.corruption`.
    """
    overrides = hf_overrides(model_config)
    given = [name for name in unread if source_of(name, overrides) == "--hf-overrides"]
    stated = [name for name in unread if name not in given]
    if stated:
        logger.warning(
            "dllm: config.json of %s: %s %s ignored; if the model needs %s, its answers are wrong",
            model_config.model,
            listed(stated),
            *(("is", "it") if len(stated) == 1 else ("are", "them")),
        )
    if given:
        from vllm_dllm.settings.unknown_names import as_option, meant_by

        meant = meant_by({name: overrides.get(name) for name in given}, corruption)
        logger.warning(
            "dllm: --hf-overrides: %s %s no effect; %s",
            listed(given),
            "has" if len(given) == 1 else "have",
            f"set it with {as_option(meant)}" if meant else "remove it",
        )
