"""The decoding settings in a model's generation config, by default the checkpoint's.

They are the fields of ``generation_config.json``, overridden by ``--override-generation-config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm.families.base import Family
from vllm_dllm.families.config_fields import merged
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import FOLDER, OVERRIDE, SAMPLER

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def generation_settings(
    vllm_config: VllmConfig, family: Family
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The decoding settings of the generation config, as `Served.checkpoint` and `.elsewhere`.

    As in vLLM, the checkpoint's file is used unless ``--generation-config`` names a folder, and
    ``--override-generation-config`` overrides its fields. ``--generation-config vllm`` affects only
    the sampling parameters of requests.

    Raises:
        SettingsError: a field is missing or out of range, or has no effect as an override.
    """
    model = vllm_config.model_config
    override = model.override_generation_config
    if override:
        from vllm_dllm.settings.unknown_names import refuse_overrides

        refuse_overrides(override, family.corruption)
    settings = family.checkpoint_settings(merged(generation_config(vllm_config), override))
    own = model.generation_config in ("auto", "vllm")
    elsewhere = {} if own else dict.fromkeys(settings, FOLDER)
    overridden = settings.keys() & {*override, *override.get(SAMPLER, {})}
    return settings, elsewhere | dict.fromkeys(overridden, OVERRIDE)


def generation_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """The content of ``generation_config.json``; empty if there is no such file.

    Raises:
        SettingsError: the file is not a JSON object; vLLM would ignore it silently.
    """
    model = vllm_config.model_config
    own = model.generation_config in ("auto", "vllm")
    file = Path(model.model if own else model.generation_config) / "generation_config.json"
    if file.is_file():
        try:
            whole = isinstance(json.loads(file.read_text()), dict)
        except ValueError:
            whole = False
        if not whole:
            raise SettingsError(f"{file} is not a JSON object")
    return model.try_get_generation_config()
