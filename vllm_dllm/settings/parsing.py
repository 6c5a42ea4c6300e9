"""The only parser of what users write: the settings of a server and the options of a request.

Server settings come from ``--additional-config '{"dllm": {...}}'`` and request options from
``vllm_xargs`` (HTTP) or ``SamplingParams.extra_args`` (offline). An unknown key is an error that
suggests the nearest name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from vllm_dllm.ranges import SettingsError, closest, nearest, shown
from vllm_dllm.settings.file import read_settings_file
from vllm_dllm.settings.misplaced import (
    SETTINGS_KEY,
    refuse_settings_outside,
    refuse_unknown_extra_arguments,
)
from vllm_dllm.settings.request import REQUEST_PREFIX, RequestOptions
from vllm_dllm.settings.server import DllmSettings

# Returns the names of settings of algorithms for other kinds of models, each with the sentence that
# refuses it. It is a function because only refusals need the names.
Foreign = Callable[[], Mapping[str, str]]


def _reject_unknown(
    kind: str, given: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]
) -> None:
    """Refuse unknown names; `elsewhere` has a sentence for each name that is known elsewhere."""
    known = set(known)
    for name in given:
        if name in known:
            continue
        if name in elsewhere:
            raise SettingsError(elsewhere[name])
        text = name if isinstance(name, str) else ""
        meant = closest(text, [*known, *elsewhere])
        if meant is not None and meant in elsewhere:
            raise SettingsError(f"unknown {kind} {shown(name)}: {elsewhere[meant]}")
        raise SettingsError(f"unknown {kind} {shown(name)}; {nearest(text, known)}")


def _known_to_requests(parameters: Collection[str], foreign: Foreign) -> dict[str, str]:
    """Names that a server's section must not hold: request options and foreign settings."""
    only = set(_names(RequestOptions, ())) - set(_names(DllmSettings, ()))
    return (
        dict(foreign())
        | {
            name: f"dllm.{name} is an option of requests; send {REQUEST_PREFIX}{name} in vllm_xargs"
            for name in only
        }
        | {
            REQUEST_PREFIX + name: f"dllm.{REQUEST_PREFIX}{name}: only options of requests have "
            f"the prefix; write {name!r}"
            for name in _names(DllmSettings, parameters)
        }
    )


def _known_to_servers(foreign: Foreign) -> dict[str, str]:
    """Names that a request must not hold: server settings and foreign settings."""
    only = set(_names(DllmSettings, ())) - set(_names(RequestOptions, ()))
    return {REQUEST_PREFIX + name: sentence for name, sentence in foreign().items()} | {
        REQUEST_PREFIX + name: f"{REQUEST_PREFIX}{name} is not an option of requests: the whole "
        f"server has one value, dllm.{name} of --additional-config"
        for name in only
    }


def parse_settings(
    additional_config: object,
    parameters_with: Callable[[object], Collection[str]],
    foreign: Foreign = dict,
) -> DllmSettings:
    """Parse server settings from vLLM's ``additional_config``.

    ``{"dllm": {"config": "file.yaml"}}`` reads the same keys from a YAML file; keys given
    next to ``config`` override the file.

    Args:
        additional_config: the value of vLLM's option.
        parameters_with: called with the requested algorithm (or None); returns the names of all
            algorithms' settings. An algorithm that is named by its import path is known only after
            this call.
        foreign: see `Foreign`.

    Raises:
        SettingsError: a key is unknown or stands outside the section, a value is out of range, or
            the file cannot be read.
    """
    section = (
        additional_config.get(SETTINGS_KEY) if isinstance(additional_config, Mapping) else None
    )
    if section is None:
        every = {*_names(DllmSettings, parameters_with(None)), "config", *foreign()}
        refuse_settings_outside(additional_config, every)
        return DllmSettings()
    if not isinstance(section, Mapping):
        raise SettingsError(
            f"--additional-config: 'dllm' must be an object of settings, got {shown(section)}"
        )
    path = section.get("config")
    from_file = {} if path is None else read_settings_file(path)
    parameters = parameters_with(section.get("algorithm", from_file.get("algorithm")))
    known = _names(DllmSettings, parameters)
    refuse_settings_outside(additional_config, {*known, "config", *foreign()})
    elsewhere = _known_to_requests(parameters, foreign)
    _reject_unknown("dllm setting", section, [*known, "config"], elsewhere)
    _reject_unknown(f"dllm setting in {path}:", from_file, known, elsewhere)
    DllmSettings(**_gathered(from_file, parameters))  # the file must be valid by itself
    values = {name: value for name, value in section.items() if name != "config"}
    chosen = from_file | values
    given = frozenset(name for name, value in chosen.items() if value is not None)
    return DllmSettings(**_gathered(chosen, parameters), given=given)


def _names(
    cls: type[DllmSettings] | type[RequestOptions], parameters: Collection[str]
) -> list[str]:
    """The names that users may write: the fields of `cls` and the algorithms' `parameters`."""
    own = [f.name for f in fields(cls) if f.name not in ("parameters", "given")]
    return own + sorted(parameters)


def _gathered(values: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Turn flat names into keyword arguments, with all algorithms' settings in one mapping."""
    own = {name: value for name, value in values.items() if name not in parameters}
    return own | {"parameters": {k: v for k, v in values.items() if k in parameters}}


def parse_request_options(
    extra_args: Mapping[str, Any] | None,
    parameters: Collection[str],
    foreign: Foreign = dict,
) -> RequestOptions:
    """Parse request options from ``SamplingParams.extra_args``.

    Keys without the prefix ``diffusion_`` are left to vLLM if it reads them, and refused otherwise.

    Args:
        extra_args: the extra arguments of a request.
        parameters: names of all algorithms' settings, without the prefix.
        foreign: see `Foreign`.

    Raises:
        SettingsError: a key is unknown, an option lacks its prefix, or a value is out of range.
    """
    given = extra_args or {}
    ours = {
        name: value
        for name, value in given.items()
        if isinstance(name, str) and name.startswith(REQUEST_PREFIX)
    }
    names = _names(RequestOptions, parameters)
    if len(ours) < len(given):
        refuse_unknown_extra_arguments(given, {*names, *foreign()})
    known = {REQUEST_PREFIX + name for name in names}
    if not ours.keys() <= known:
        _reject_unknown("request option", ours, known, _known_to_servers(foreign))
    flat = {name.removeprefix(REQUEST_PREFIX): value for name, value in ours.items()}
    return RequestOptions(**_gathered(flat, parameters))


def server_names(parameters: Collection[str]) -> set[str]:
    """The names of all settings of a server.

    Args:
        parameters: names of all algorithms' settings.
    """
    return set(_names(DllmSettings, parameters))


def request_names(parameters: Collection[str]) -> set[str]:
    """The names of all request options, without the prefix.

    Args:
        parameters: names of all algorithms' settings.
    """
    return set(_names(RequestOptions, parameters))
