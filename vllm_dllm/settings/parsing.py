"""The only parser of what users write: the settings of a server and the options of a request.

Server settings come from
``--additional-config '{"dllm": {...}}'`` and request options from ``vllm_xargs`` (HTTP) or
``SamplingParams.extra_args`` (offline). An unknown key is an error that suggests the nearest name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from vllm_dllm.settings.file import read_settings_file
from vllm_dllm.settings.ranges import SettingsError, nearest, shown
from vllm_dllm.settings.request import REQUEST_PREFIX, RequestOptions
from vllm_dllm.settings.server import DllmSettings

SETTINGS_KEY = "dllm"


def _reject_unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = set(known)
    for name in given:
        if name not in known:
            hint = nearest(name if isinstance(name, str) else "", known)
            raise SettingsError(f"unknown {kind} {shown(name)}; {hint}")


def parse_settings(
    additional_config: object, parameters_with: Callable[[object], Collection[str]]
) -> DllmSettings:
    """Server settings from vLLM's ``additional_config``.

    ``{"dllm": {"config": "file.yaml"}}`` reads the same keys from a YAML file; keys given
    next to ``config`` take precedence over the file.

    Args:
        additional_config: the value of vLLM's option.
        parameters_with: called with the algorithm that is asked for (or None); returns the names
            of all algorithms' settings. An algorithm that is named by its import path is only
            known after this call.

    Raises:
        SettingsError: a key is unknown, a value is out of range, or the file cannot be read.
    """
    section = (
        additional_config.get(SETTINGS_KEY) if isinstance(additional_config, Mapping) else None
    )
    if section is None:
        return DllmSettings()
    if not isinstance(section, Mapping):
        raise SettingsError(f"additional_config['dllm'] must be an object, got {shown(section)}")
    path = section.get("config")
    from_file = {} if path is None else read_settings_file(path)
    parameters = parameters_with(section.get("algorithm", from_file.get("algorithm")))
    known = _names(DllmSettings, parameters)
    _reject_unknown("dllm setting", section, [*known, "config"])
    _reject_unknown(f"dllm setting in {path}:", from_file, known)
    DllmSettings(**_gathered(from_file, parameters))  # the file must be right by itself
    values = {name: value for name, value in section.items() if name != "config"}
    chosen = from_file | values
    given = frozenset(name for name, value in chosen.items() if value is not None)
    return DllmSettings(**_gathered(chosen, parameters), given=given)


def misspelt_settings(additional_config: object) -> list[str]:
    """Keys of vLLM's ``additional_config`` that are probably misspelt forms of ``dllm``.

    They differ from it by one edit, by case, or by surrounding blanks. The settings below such a
    key would be ignored.
    """
    keys = additional_config if isinstance(additional_config, Mapping) else ()
    return [key for key in keys if isinstance(key, str) and _nearly(key, SETTINGS_KEY)]


def _nearly(name: str, key: str) -> bool:
    """Whether two names differ, by case, by surrounding blanks, by one letter or by one swap."""
    name, given = name.strip().lower()[: len(key) + 2], name
    if name == key:
        return given != key
    for at in range(len(key) + 1):
        before, behind = key[:at], key[at:]
        if name in (before + behind[1:], before + behind[1:2] + behind[:1] + behind[2:]):
            return True
        rest = name[at + 1 :]
        if name[:at] == before and len(name) > at and rest in (behind, behind[1:]):
            return True
    return False


def _names(
    cls: type[DllmSettings] | type[RequestOptions], parameters: Collection[str]
) -> list[str]:
    """The names that users may write: the fields of `cls`, and the algorithms' `parameters`."""
    own = [f.name for f in fields(cls) if f.name not in ("parameters", "given")]
    return own + sorted(parameters)


def _gathered(values: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Turn flat names into keyword arguments, with all algorithms' settings in one mapping."""
    own = {name: value for name, value in values.items() if name not in parameters}
    return own | {"parameters": {k: v for k, v in values.items() if k in parameters}}


def parse_request_options(
    extra_args: Mapping[str, Any] | None, parameters: Collection[str]
) -> RequestOptions:
    """Request options from ``SamplingParams.extra_args``.

    Keys without the prefix ``diffusion_`` are ignored, because they are not meant for this package.

    Args:
        extra_args: the extra arguments of a request.
        parameters: names of all algorithms' settings, without the prefix.

    Raises:
        SettingsError: a ``diffusion_*`` key is unknown, or a value is out of range.
    """
    ours = {
        name: value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(REQUEST_PREFIX)
    }
    known = [REQUEST_PREFIX + name for name in _names(RequestOptions, parameters)]
    _reject_unknown("request option", ours, known)
    flat = {name.removeprefix(REQUEST_PREFIX): value for name, value in ours.items()}
    return RequestOptions(**_gathered(flat, parameters))
