"""Finds a model's generation config and the decoding settings in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm.decoding import MODELS, other_kind
from vllm_dllm.families.base import Family
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.generation_config import (
    LENGTHS,
    SAMPLER,
    SAMPLER_FIELDS,
    check_sampler_override,
    overridden,
)
from vllm_dllm.settings.misplaced import as_option
from vllm_dllm.settings.parsing import server_names
from vllm_dllm.settings.resolution import FOLDER, OVERRIDE, parameter_names
from vllm_dllm.startup.config_fields import merged

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def generation_settings(
    vllm_config: VllmConfig, family: Family
) -> tuple[Mapping[str, float], dict[str, str]]:
    """The decoding settings of the generation config, as `Served.checkpoint` and `.elsewhere`.

    As in vLLM, the checkpoint's file is used unless ``--generation-config`` names a folder, and
    ``--override-generation-config`` overrides its fields. ``--generation-config vllm`` affects only
    the sampling parameters of requests.

    Raises:
        SettingsError: a field is missing or out of range, or has no effect as an override.
    """
    model = vllm_config.model_config
    override = model.override_generation_config
    _refuse_overrides_without_effect(override, family)
    settings = family.checkpoint_settings(merged(generation_config(vllm_config), override))
    own = model.generation_config in ("auto", "vllm")
    elsewhere = {} if own else dict.fromkeys(settings, FOLDER)
    return settings, elsewhere | dict.fromkeys(overridden(settings, override), OVERRIDE)


def _refuse_overrides_without_effect(override: Mapping[str, Any], family: Family) -> None:
    """Refuse decoding settings that a generation config of this model cannot state."""
    own, other = family.corruption, other_kind(family.corruption)
    parameters, foreign = parameter_names(own), parameter_names(other)
    stated = SAMPLER_FIELDS if own == "uniform" else parameters
    for name, value in override.items():
        if name in LENGTHS:
            length = json.dumps({"canvas_length": value})
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use --diffusion-config "
                f"'{length}'"
            )
        if name in server_names(parameters) and name not in stated:
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use "
                f"{as_option({name: value})}"
            )
        if (name in foreign and name not in parameters) or (name == SAMPLER and own != "uniform"):
            raise SettingsError(
                f"{OVERRIDE}: {name} is not a setting of this model, but of {MODELS[other]}; "
                "remove it (--additional-config has this model's settings)"
            )
    check_sampler_override(override)


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
