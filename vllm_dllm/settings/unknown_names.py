"""Refusals of names that are unknown, or known elsewhere, and so would be ignored.

They say where a name belongs, or which one was probably meant.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vllm_dllm.decoding import Algorithm, Corruption
from vllm_dllm.decoding.registry import MODELS, algorithm_names, algorithms, other_kind
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
    known = NAMES | algorithm.config.ranges().keys()
    usual = algorithm_names(algorithm.corruption, of_every_model=True)
    elsewhere = _of_other_algorithms(algorithm, PREFIXES[SERVER], usual.__contains__)
    for name in OPTIONS.keys() - NAMES:
        elsewhere[name] = (
            f"dllm.{name} is an option of requests; send {REQUEST_PREFIX}{name} in vllm_xargs"
        )
    for name in known:
        elsewhere[REQUEST_PREFIX + name] = (
            f"dllm.{REQUEST_PREFIX}{name}: only options of requests have the prefix; write {name!r}"
        )
    _refuse("dllm setting", section, known, elsewhere)


def refuse_options(
    extra_args: Mapping[str, object],
    given: Iterable[str],
    algorithm: Algorithm,
    accepts: Callable[[str], bool],
) -> None:
    """Refuse extra arguments of a request that are meant for this package but not read by it.

    Args:
        extra_args: the extra arguments of a request; vLLM and its extensions read others.
        given: those that have our prefix, without it.
        algorithm: the request's algorithm.
        accepts: whether the server accepts another algorithm.
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
    elsewhere = _of_other_algorithms(algorithm, PREFIXES[REQUEST], accepts)
    for name in NAMES - OPTIONS.keys():
        elsewhere[name] = (
            f"{REQUEST_PREFIX}{name} is not an option of requests: the whole server has one value, "
            f"dllm.{name} of --additional-config"
        )
    _refuse(
        "request option",
        (REQUEST_PREFIX + name for name in given),
        {REQUEST_PREFIX + name for name in (*OPTIONS, *algorithm.config.ranges())},
        {REQUEST_PREFIX + name: sentence for name, sentence in elsewhere.items()},
    )


def _refuse(
    kind: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]
) -> None:
    """Refuse the first unknown name; `elsewhere` has a sentence for each that is known there."""
    for name in given:
        if name in known:
            continue
        if name in elsewhere:
            raise SettingsError(elsewhere[name])
        text = name if isinstance(name, str) else ""
        meant = closest(text, [*known, *elsewhere])
        sentence = None if meant is None else elsewhere.get(meant)
        hint = f"; {nearest(text, known)}" if sentence is None else f": {sentence}"
        raise SettingsError(f"unknown {kind} {shown(name)}{hint}")


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


def _of_other_algorithms(
    algorithm: Algorithm, prefix: str, accepts: Callable[[str], bool]
) -> dict[str, str]:
    """The settings that only other algorithms have, each with the sentence that refuses it."""
    ranges, other = algorithm.config.ranges(), other_kind(algorithm.corruption)
    own = ", ".join(prefix + known for known in sorted(ranges)) or "none"

    def owners(name: str, corruption: Corruption) -> list[str]:
        return [a.name for a in algorithms(corruption) if name in a.config.ranges()]

    sentences = {}
    for name in parameter_names() - ranges.keys():
        sentence = (
            f"{prefix}{name} is not a setting of {algorithm.name}, which has {own}; remove it"
        )
        alike, foreign = owners(name, algorithm.corruption), owners(name, other)
        if chosen := [one for one in alike if accepts(one)]:
            sentence += f", or set {prefix}algorithm to {listed(chosen, 'or')}"
        elif not alike:
            sentence += f", because it belongs to {listed(foreign)}, for {MODELS[other]}"
        sentences[name] = sentence
    return sentences


def parameter_names(*kinds: Corruption) -> set[str]:
    """The names of the settings of all algorithms for these kinds of models; of all by default."""
    kinds = kinds or ("mask", "uniform")
    return {name for kind in kinds for each in algorithms(kind) for name in each.config.ranges()}


def option_names() -> set[str]:
    """The names of all request options, without prefix, including those of other models."""
    return OPTIONS.keys() | parameter_names()


def refuse_overrides(override: Mapping[str, Any], own: Corruption) -> None:
    """Refuse what ``--override-generation-config`` says about decoding without effect."""
    other = other_kind(own)
    parameters, foreign = parameter_names(own), parameter_names(other)
    stated = SAMPLER_FIELDS if own == "uniform" else parameters
    for name, value in override.items():
        if name in LENGTHS:
            length = json.dumps({"canvas_length": value})
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use --diffusion-config "
                f"'{length}'"
            )
        if name in NAMES | parameters and name not in stated:
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use "
                f"--additional-config '{_as_json({SETTINGS_KEY: {name: value}})}'"
            )
        if (name in foreign and name not in parameters) or (name == SAMPLER and own != "uniform"):
            raise SettingsError(
                f"{OVERRIDE}: {name} is not a setting of this model, but of {MODELS[other]}; "
                "remove it (--additional-config has this model's settings)"
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
