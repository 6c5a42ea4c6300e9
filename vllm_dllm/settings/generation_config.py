"""The decoding settings in a generation config, by default the checkpoint's.

They are the fields of ``generation_config.json``, overridden by ``--override-generation-config``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm_dllm.ranges import SettingsError, nearest, shown

MAX_STEPS_FIELD = "max_denoising_steps"
# Fields of DiffusionGemma's sampler that a generation config must have.
SAMPLER_FIELDS = ("t_min", "t_max", "stability_threshold", "confidence_threshold")
SAMPLER, SAMPLER_CLASS, BOUND = "sampler_config", "EntropyBoundSamplerConfig", "entropy_bound"
# Names of the block length, which belong in ``config.json``.
LENGTHS = ("block_length", "canvas_length", "block_size")
OPTION = "--override-generation-config"


def parse_sampler(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The settings of DiffusionGemma's sampler and ``max_denoising_steps``, by name.

    Raises:
        SettingsError: a field is missing; the message names it. Ranges are checked where settings
            are resolved.
    """
    sampler = generation_config.get(SAMPLER)
    if not isinstance(sampler, Mapping):
        raise SettingsError(f"generation_config.json has no {SAMPLER!r}")
    if sampler.get("_cls_name") != SAMPLER_CLASS:
        raise SettingsError(
            f"generation_config.json: {SAMPLER}._cls_name must be {SAMPLER_CLASS!r}, got "
            f"{shown(sampler.get('_cls_name'))}"
        )
    values: dict[str, Any] = {
        name: generation_config.get(name) for name in (MAX_STEPS_FIELD, *SAMPLER_FIELDS)
    }
    values[f"{SAMPLER}.{BOUND}"] = sampler.get(BOUND)
    for name, value in values.items():
        if value is None:
            raise SettingsError(f"generation_config.json has no {name!r}")
    return {name.removeprefix(f"{SAMPLER}."): value for name, value in values.items()}


def parse_checkpoint(
    generation_config: Mapping[str, Any], parameters: Collection[str]
) -> dict[str, float]:
    """The decoding settings in the generation config of a masked model, by name.

    The algorithms' settings (`parameters`) and ``max_denoising_steps`` are read; fields about
    autoregressive decoding are ignored. Ranges are checked where settings are resolved.
    """
    known = (MAX_STEPS_FIELD, *parameters)
    return {name: generation_config[name] for name in known if name in generation_config}


def check_sampler_override(override: Mapping[str, Any]) -> None:
    """Check what ``--override-generation-config`` says about the sampler.

    Raises:
        SettingsError: one of its fields is unknown, or it is not an object.
    """
    sampler = override.get(SAMPLER, {})
    if not isinstance(sampler, Mapping):
        raise SettingsError(f"{OPTION}: {SAMPLER} must be an object, got {shown(sampler)}")
    known = ("_cls_name", BOUND)
    for name in sampler:
        if name not in known:
            raise SettingsError(f"{OPTION}: unknown {SAMPLER}.{name}; {nearest(name, known)}")


def overridden(settings: Mapping[str, Any], override: Mapping[str, Any]) -> set[str]:
    """The settings whose value comes from ``--override-generation-config``.

    Args:
        settings: the settings in a generation config with the override applied, by name.
        override: the option's value.
    """
    return settings.keys() & {*override, *override.get(SAMPLER, {})}
