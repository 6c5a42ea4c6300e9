"""Read the fields of ``config.json`` as stated, and warn about those that are ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.checkpoints.config_fields import source_of
from vllm_dllm.ranges import listed
from vllm_dllm.settings.misplaced import as_option, meant_by

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.dllm")


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


def warn_of_unread_names(
    model_config: ModelConfig,
    unread: Collection[str],
    settings: Collection[str],
    algorithms: Collection[str],
) -> None:
    """Warn about each name that would otherwise be ignored silently.

    Args:
        model_config: vLLM's configuration of the model.
        unread: fields of ``config.json`` with ``--hf-overrides`` that are ignored.
        settings: the names of the settings that a server of this model has.
        algorithms: the names of the algorithms that it has.
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
        meant = meant_by({name: overrides.get(name) for name in given}, settings, algorithms)
        logger.warning(
            "dllm: --hf-overrides: %s %s no effect; %s",
            listed(given),
            "has" if len(given) == 1 else "have",
            f"set it with {as_option(meant)}" if meant else "remove it",
        )
