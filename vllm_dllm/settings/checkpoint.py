"""The decoding settings in a checkpoint's ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm_dllm.settings.ranges import SettingsError, shown
from vllm_dllm.settings.server import STEPS

MAX_STEPS_FIELD = "max_denoising_steps"
# Fields of DiffusionGemma's sampler that generation_config.json must have.
SAMPLER_FIELDS = ("t_min", "t_max", "stability_threshold", "confidence_threshold")


def parse_sampler(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The settings of DiffusionGemma's sampler and ``max_denoising_steps``, by name.

    Raises:
        SettingsError: a field is missing (the message names it), or ``max_denoising_steps`` is out
            of range. The algorithm checks the ranges of the others.
    """
    sampler = generation_config.get("sampler_config")
    if not isinstance(sampler, Mapping):
        raise SettingsError("generation_config.json has no 'sampler_config'")
    if sampler.get("_cls_name") != "EntropyBoundSamplerConfig":
        raise SettingsError(
            "generation_config.json: sampler_config._cls_name must be "
            f"'EntropyBoundSamplerConfig', got {shown(sampler.get('_cls_name'))}"
        )
    values: dict[str, Any] = {
        name: generation_config.get(name) for name in (MAX_STEPS_FIELD, *SAMPLER_FIELDS)
    }
    values["sampler_config.entropy_bound"] = sampler.get("entropy_bound")
    for name, value in values.items():
        if value is None:
            raise SettingsError(f"generation_config.json has no {name!r}")
    STEPS.check(f"generation_config.json: {MAX_STEPS_FIELD}", values[MAX_STEPS_FIELD])
    return {name.removeprefix("sampler_config."): value for name, value in values.items()}


def parse_checkpoint(
    generation_config: Mapping[str, Any], parameters: Collection[str]
) -> dict[str, float]:
    """The decoding settings in the ``generation_config.json`` of a masked model, by name.

    Read are the algorithms' settings (`parameters`) and ``max_denoising_steps``; fields about
    autoregressive decoding are ignored.

    Raises:
        SettingsError: ``max_denoising_steps`` is out of range. The algorithm checks the ranges of
            the others.
    """
    known = (MAX_STEPS_FIELD, *parameters)
    stated = {name: generation_config[name] for name in known if name in generation_config}
    if MAX_STEPS_FIELD in stated:
        STEPS.check(f"generation_config.json: {MAX_STEPS_FIELD}", stated[MAX_STEPS_FIELD])
    return stated
