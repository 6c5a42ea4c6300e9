"""Refusals of names that are unknown, or known elsewhere, and so would be ignored.

They say where a name belongs, or which one was probably meant. This module is imported only when
there is something to refuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from vllm_dllm.decoding import MODELS, Algorithm, Corruption, algorithms, other_kind
from vllm_dllm.ranges import MOST_CHARACTERS, SettingsError, closest, cut, listed, nearest, shown
from vllm_dllm.settings.parsing import SETTINGS_KEY, Others, names_of
from vllm_dllm.settings.request import LENGTHS, REQUEST_PREFIX, RequestOptions
from vllm_dllm.settings.resolution import BOUND, OVERRIDE, SAMPLER, SAMPLER_FIELDS
from vllm_dllm.settings.server import DllmSettings

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
# The extra arguments of a request that vLLM itself and its KV connectors read.
VLLMS_OWN = {"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "session_id"}


def refuse_settings_outside(
    additional_config: Mapping[Any, object], known: Callable[[], Collection[str]]
) -> None:
    """Refuse keys that were meant for the section ``dllm`` but stand next to it.

    All plugins and platforms of vLLM share ``additional_config``, so most of its other keys belong
    to others and are left alone. Three kinds of keys that would be ignored are refused: the exact
    name of one of our settings, a name that is almost ``dllm``, and any name that begins with
    ``dllm_``. A misspelt setting outside the section cannot be distinguished from another plugin's
    key.

    Args:
        additional_config: the value of vLLM's option.
        known: returns the names of all settings, including those of other algorithms.

    Raises:
        SettingsError: there is such a key; the message names it and shows where it belongs.
    """
    others = {key: value for key, value in additional_config.items() if key != SETTINGS_KEY}
    settings = known() if others else ()
    for key in misspelt_sections(others):
        raise SettingsError(
            f"--additional-config: the key {shown(key)} is unknown; did you mean {SETTINGS_KEY!r}?"
        )
    for key, value in others.items():
        if key in settings:
            raise SettingsError(
                f"--additional-config: {key!r} is outside of {SETTINGS_KEY!r}, where it is "
                f"ignored; write {_as_json({SETTINGS_KEY: {key: value}})}"
            )
        if isinstance(key, str) and key.startswith(OTHERS_PREFIX):
            raise SettingsError(
                f"--additional-config: {shown(key)} is not a setting of vllm-dllm, whose settings "
                f'are in {{"{SETTINGS_KEY}": {{...}}}}; {_our_name(key, settings, "")}'
            )


def refuse_settings(
    kind: str, given: Iterable[str], known: Collection[str], others: Others
) -> None:
    """Refuse names that a server does not have as settings.

    Args:
        kind: what the names are, for the message.
        given: the names in a section.
        known: the names that it may hold.
        others: see `parsing.Others`.

    Raises:
        SettingsError: a name is unknown, belongs to another algorithm, or is a request's option.
    """
    if not set(given) - set(known):
        return
    options = names_of(RequestOptions, ()) - names_of(DllmSettings, ())
    elsewhere = dict(others())
    for name in options:
        elsewhere[name] = (
            f"dllm.{name} is an option of requests; send {REQUEST_PREFIX}{name} in vllm_xargs"
        )
    for name in known:
        elsewhere[REQUEST_PREFIX + name] = (
            f"dllm.{REQUEST_PREFIX}{name}: only options of requests have the prefix; write {name!r}"
        )
    _refuse(kind, given, known, elsewhere)


def refuse_options(given: Iterable[str], known: Collection[str], others: Others) -> None:
    """Refuse names that a request does not have as options; all names are without the prefix.

    Args:
        given: the names in a request.
        known: the names of its options.
        others: see `parsing.Others`.

    Raises:
        SettingsError: a name is unknown, belongs to another algorithm, or is a server's setting.
    """
    if not set(given) - set(known):
        return
    elsewhere = dict(others())
    for name in names_of(DllmSettings, ()) - names_of(RequestOptions, ()):
        elsewhere[name] = (
            f"{REQUEST_PREFIX}{name} is not an option of requests: the whole server has one value, "
            f"dllm.{name} of --additional-config"
        )
    _refuse(
        "request option",
        (REQUEST_PREFIX + name for name in given),
        {REQUEST_PREFIX + name for name in known},
        {REQUEST_PREFIX + name: sentence for name, sentence in elsewhere.items()},
    )


def _refuse(
    kind: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]
) -> None:
    """Refuse the first unknown name; `elsewhere` has a sentence for each that is known there."""
    name = next(name for name in given if name not in known)
    if name in elsewhere:
        raise SettingsError(elsewhere[name])
    text = name if isinstance(name, str) else ""
    meant = closest(text, [*known, *elsewhere])
    if meant is not None and meant in elsewhere:
        raise SettingsError(f"unknown {kind} {shown(name)}: {elsewhere[meant]}")
    raise SettingsError(f"unknown {kind} {shown(name)}; {nearest(text, known)}")


def settings_of_others(algorithm: Algorithm, prefix: str) -> dict[str, str]:
    """The settings that only other algorithms have.

    Args:
        algorithm: the algorithm in force.
        prefix: the prefix of settings where they are given.

    Returns:
        The settings' names without a prefix, each with the sentence that refuses it.
    """
    ranges, other = algorithm.config.ranges(), other_kind(algorithm.corruption)
    own = ", ".join(prefix + known for known in sorted(ranges)) or "none"
    sentences = {}
    for name in every_parameter() - ranges.keys():
        sentence = (
            f"{prefix}{name} is not a setting of {algorithm.name}, which has {own}; remove it"
        )
        alike = _owners(name, algorithm.corruption)
        sentences[name] = (
            f"{sentence}, or set {prefix}algorithm to {listed(alike, 'or')}"
            if alike
            else f"{sentence}, because it belongs to {listed(_owners(name, other))}, for "
            f"{MODELS[other]}"
        )
    return sentences


def parameter_names(corruption: Corruption) -> set[str]:
    """The names of the settings of all algorithms for a kind of model."""
    return {name for algorithm in algorithms(corruption) for name in algorithm.config.ranges()}


def every_parameter() -> set[str]:
    """The names of the settings of all algorithms."""
    return parameter_names("mask") | parameter_names("uniform")


def _owners(name: str, corruption: Corruption) -> list[str]:
    return [a.name for a in algorithms(corruption) if name in a.config.ranges()]


def refuse_overrides(override: Mapping[str, Any], own: Corruption) -> None:
    """Refuse what ``--override-generation-config`` says about decoding without effect.

    Args:
        override: the option's value.
        own: the kind of the model.

    Raises:
        SettingsError: a generation config of this model cannot state a setting; names it.
    """
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
        if name in names_of(DllmSettings, parameters) and name not in stated:
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use "
                f"{as_option({name: value})}"
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


def meant_by(given: Mapping[str, object], corruption: Corruption) -> dict[str, object]:
    """The server's settings that fields of other places or engines probably stand for.

    Args:
        given: names and values, such as ``{"diffusion_entropy_bound": 0.1}``.
        corruption: the kind of the model, which says what algorithms and settings its server has.
    """
    meant: dict[str, object] = {}
    folded = {algorithm.name.casefold(): algorithm.name for algorithm in algorithms(corruption)}
    settings = names_of(DllmSettings, parameter_names(corruption))
    for field, value in given.items():
        name = field.rpartition(".")[2].removeprefix("diffusion_")
        algorithm = folded.get(str(value).replace("_", "").casefold())
        if name in ("algorithm", "sampler") and algorithm is not None:
            meant["algorithm"] = algorithm
        elif name in settings:
            meant[name] = value
    return meant


def as_option(settings: Mapping[str, object]) -> str:
    """How a user gives settings to a server."""
    return f"--additional-config '{_as_json({SETTINGS_KEY: settings})}'"


def misspelt_sections(additional_config: Iterable[object]) -> list[str]:
    """Keys that are probably misspelt forms of ``dllm``: by a letter, by case, or by blanks."""

    def is_near(name: str) -> bool:
        name = name[: len(SETTINGS_KEY) + 3].strip().lower()
        alike = SequenceMatcher(None, name, SETTINGS_KEY).ratio()
        return alike >= 0.75 and abs(len(name) - len(SETTINGS_KEY)) <= 1

    names = (key for key in additional_config if isinstance(key, str) and key != SETTINGS_KEY)
    return [name for name in names if is_near(name)]


def refuse_extra_arguments(
    extra_args: Mapping[str, object], known: Callable[[], Collection[str]]
) -> None:
    """Refuse extra arguments of a request that neither this package nor vLLM reads.

    Args:
        extra_args: the extra arguments of a request.
        known: returns the names of all options, without the prefix.

    Raises:
        SettingsError: there is such an argument; the message names it, and the option's name here.
    """
    for name in extra_args:
        if isinstance(name, str) and (name.startswith(REQUEST_PREFIX) or name in VLLMS_OWN):
            continue
        options = known()
        if name in options:
            raise SettingsError(
                f"vllm_xargs: {name!r} is ignored; the option is {REQUEST_PREFIX + name!r}"
            )
        raise SettingsError(
            f"vllm_xargs: {shown(name)} is unknown and would be ignored; "
            f"{_our_name(name, options, REQUEST_PREFIX)}"
        )


def _our_name(name: object, known: Collection[str], prefix: str) -> str:
    """A hint at our name for what is called `name` elsewhere.

    Args:
        name: an unknown name, with or without `OTHERS_PREFIX`.
        known: our names, without a prefix.
        prefix: the prefix of our names.
    """
    bare = name.removeprefix(OTHERS_PREFIX) if isinstance(name, str) else ""
    if bare in BLOCK_LENGTHS:
        return (
            "all requests of a server have one block length, which --diffusion-config "
            "'{\"canvas_length\": ...}' sets"
        )
    meant = OTHER_NAMES.get(bare, bare)
    if meant in known:
        return f"here it is called {prefix + meant!r}"
    close = closest(bare, known)
    if close is not None:
        return f"did you mean {prefix + close!r}?"
    return f"known: {', '.join(sorted(prefix + one for one in known))}"


def _as_json(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # offline values need not be JSON
        text = shown(value)
    return text if len(text) <= MOST_CHARACTERS else cut(text)
