"""Refusals of names that are unknown, or known elsewhere, and so would be ignored.

They say where a name belongs, or which one was probably meant.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm_dllm.decoding import Algorithm, Corruption
from vllm_dllm.decoding.registry import algorithms
from vllm_dllm.ranges import SettingsError, closest, cut, listed, nearest, shown
from vllm_dllm.settings.parsing import OPTIONS
from vllm_dllm.settings.resolution import (
    BOUND,
    OVERRIDE,
    PREFIXES,
    REQUEST,
    REQUEST_PREFIX,
    SAMPLER,
    SAMPLER_FIELDS,
    SERVER,
)
from vllm_dllm.settings.server import LENGTHS, NAMES, SETTINGS_KEY

# The prefix that other packages use for their settings of diffusion models.
OTHERS_PREFIX = "dllm_"
# What other engines and the models' own scripts call our settings.
OTHER_NAMES = {
    "num_denoising_steps": "max_steps",
    "denoising_steps": "max_steps",
    "max_denoising_steps": "max_steps",
    "steps": "max_steps",
    "remasking": "algorithm",
    "remasking_strategy": "algorithm",
    "unmasking_strategy": "algorithm",
    "sampler": "algorithm",
    "confidence_threshold": "threshold",
}
# Their names for the block length, which is fixed for all requests of a server.
BLOCK_LENGTHS = {"block_length", "block_size", "canvas_size"}


def refuse_settings(
    additional_config: Mapping[Any, object], section: Mapping[Any, object], algorithm: Algorithm
) -> None:
    """Refuse names in and next to the section ``dllm`` that are not settings of the server.

    All plugins of vLLM share ``additional_config``, so most keys next to the section are left
    alone. Refused are the name of one of our settings, a name that is almost ``dllm``, and any name
    that begins with ``dllm_``.
    """
    settings = NAMES | parameter_names()
    for key, value in additional_config.items():
        if key == SETTINGS_KEY or not isinstance(key, str):
            continue
        if difflib.get_close_matches(key.strip().lower(), [SETTINGS_KEY], cutoff=0.75):
            problem = f"the key {shown(key)} is unknown; did you mean {SETTINGS_KEY!r}?"
        elif key in settings:
            problem = (
                f"{key!r} is outside of {SETTINGS_KEY!r}, where it is ignored; write "
                f"{_as_json({SETTINGS_KEY: {key: value}})}"
            )
        elif key.startswith(OTHERS_PREFIX):
            problem = (
                f"{shown(key)} is not a setting of vllm-dllm, whose settings are in "
                f'{{"{SETTINGS_KEY}": {{...}}}}; {_our_name(key, settings, "")}'
            )
        else:
            continue
        raise SettingsError(f"--additional-config: {problem}")
    _refuse(section, algorithm, SERVER)


def refuse_options(extra_args: Mapping[Any, object], algorithm: Algorithm) -> None:
    """Refuse extra arguments that are meant for this package but not read by it.

    vLLM and its extensions read others.
    """
    options = option_names()
    for name in extra_args:
        if not isinstance(name, str) or name.startswith(REQUEST_PREFIX):
            continue
        if name in options:
            raise SettingsError(
                f"vllm_xargs: {name!r} is ignored; the option is {REQUEST_PREFIX + name!r}"
            )
        others = name.startswith(OTHERS_PREFIX) or name in BLOCK_LENGTHS | OTHER_NAMES.keys()
        if others or closest(name, options) is not None:
            raise SettingsError(
                f"vllm_xargs: {shown(name)} is unknown and would be ignored; "
                f"{_our_name(name, options, REQUEST_PREFIX)}"
            )
    ours = (name for name in extra_args if str(name).startswith(REQUEST_PREFIX))
    _refuse(ours, algorithm, REQUEST)


def _refuse(given: Iterable[Any], algorithm: Algorithm, source: str) -> None:
    """Refuse the first name that the server, or a request, cannot set for this algorithm."""
    kind, prefix, common = "dllm setting", "", NAMES
    if source == REQUEST:
        kind, prefix, common = "request option", REQUEST_PREFIX, frozenset(OPTIONS)
    known = common | algorithm.config.ranges().keys()
    for name in given:
        bare = str(name).removeprefix(REQUEST_PREFIX)
        if name == prefix + bare and bare in known:
            continue
        meant = closest(bare, known | NAMES | option_names())
        if meant is None or meant in known:
            raise SettingsError(f"unknown {kind} {shown(name)}; {nearest(bare, known, prefix)}")
        unknown = "" if name == prefix + meant else f"unknown {kind} {shown(name)}: "
        raise SettingsError(unknown + _place_of(meant, algorithm, PREFIXES[source]))


def _place_of(name: str, algorithm: Algorithm, prefix: str) -> str:
    """Say where a setting belongs that is known, but not where it was given."""
    if name in OPTIONS.keys() - NAMES:
        return f"dllm.{name} is an option of requests; send {REQUEST_PREFIX}{name} in vllm_xargs"
    if name in NAMES:
        return (
            f"{REQUEST_PREFIX}{name} is not an option of requests: the whole server has one value, "
            f"dllm.{name} of --additional-config"
        )
    own = ", ".join(prefix + one for one in sorted(algorithm.config.ranges())) or "none"
    alike = [one for one in algorithms(algorithm.corruption) if not (one.verifies or one.moves)]
    owners = [one.name for one in alike if name in one.config.ranges()]
    choice = f", or set {prefix}algorithm to {listed(owners, 'or')}" if owners else ""
    return (
        f"{prefix}{name} is not a setting of {algorithm.name}, which has {own}; remove it{choice}"
    )


def _our_name(name: str, known: Collection[str], prefix: str) -> str:
    """A hint at our name, which gets the prefix, for what is called `name` elsewhere."""
    bare = name.removeprefix(OTHERS_PREFIX)
    if bare in BLOCK_LENGTHS:
        return (
            "all requests of a server have one block length, which --diffusion-config "
            "'{\"canvas_length\": ...}' sets"
        )
    meant = OTHER_NAMES.get(bare, bare)
    if meant in known:
        return f"here it is called {prefix + meant!r}"
    return nearest(bare, known, prefix)


def parameter_names(*kinds: Corruption) -> set[str]:
    """The names of the settings of all algorithms for these kinds of models; of all by default."""
    kinds = kinds or ("mask", "uniform")
    return {name for kind in kinds for each in algorithms(kind) for name in each.config.ranges()}


def option_names() -> set[str]:
    """The names of all request options, without prefix, including those of other models."""
    return OPTIONS.keys() | parameter_names()


def refuse_overrides(override: Mapping[str, Any], own: Corruption) -> None:
    """Refuse what ``--override-generation-config`` says about decoding without effect."""
    parameters = parameter_names(own)
    stated = SAMPLER_FIELDS if own == "uniform" else parameters
    for name, value in override.items():
        if name in stated:
            continue
        option, content = "--additional-config", {SETTINGS_KEY: {name: value}}
        if name in LENGTHS:
            option, content = "--diffusion-config", {"canvas_length": value}
        if name in {*LENGTHS, *NAMES, *parameters}:
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use {option} "
                f"'{_as_json(content)}'"
            )
        if name in parameter_names() or (name == SAMPLER and own != "uniform"):
            raise SettingsError(
                f"{OVERRIDE}: {name} is not a setting of this model; remove it "
                "(--additional-config has this model's settings)"
            )
    sampler = override.get(SAMPLER, {})
    if not isinstance(sampler, Mapping):
        raise SettingsError(f"{OVERRIDE}: {SAMPLER} must be an object, got {shown(sampler)}")
    known = ("_cls_name", BOUND)
    for name in sampler:
        if name not in known:
            raise SettingsError(f"{OVERRIDE}: unknown {SAMPLER}.{name}; {nearest(name, known)}")


def _as_json(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # offline values need not be JSON
        text = shown(value)
    return cut(text)
