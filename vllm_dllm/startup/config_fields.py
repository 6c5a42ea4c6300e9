"""The fields of ``config.json`` as stated, and a warning about those that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.dllm")


def stated_fields(model_config: ModelConfig) -> dict[str, Any]:
    """The fields of ``config.json`` as written, overridden by ``--hf-overrides``."""
    overrides = model_config.hf_overrides if isinstance(model_config.hf_overrides, dict) else {}
    stated = get_hf_file_to_dict("config.json", model_config.model, model_config.revision) or {}
    return _merged(stated, overrides)


def _merged(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override like vLLM: objects are merged, everything else is replaced."""
    merged = dict(stated)
    for name, value in overrides.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def warn_of_unread_names(vllm_config: VllmConfig, unknown: list[str]) -> None:
    """Warn of each name that would otherwise be ignored silently.

    Args:
        vllm_config: vLLM's configuration.
        unknown: fields of ``config.json`` that nothing reads.
    """
    if unknown:
        logger.warning(
            "dllm: config.json of %s: %s: nobody reads %s; if the model needs %s, its answers are "
            "wrong",
            vllm_config.model_config.model,
            ", ".join(unknown),
            *(("it", "it") if len(unknown) == 1 else ("them", "them")),
        )
