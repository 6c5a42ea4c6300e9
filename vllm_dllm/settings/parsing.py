"""The only parser of what users write: the settings of a server and the options of a request.

Server settings come from ``--additional-config '{"dllm": {...}}'`` and request options from
``vllm_xargs`` (HTTP) or ``SamplingParams.extra_args`` (offline). An unknown key is an error that
suggests the nearest name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from vllm_dllm.ranges import SettingsError, shown
from vllm_dllm.settings.request import REQUEST_PREFIX, RequestOptions
from vllm_dllm.settings.server import DllmSettings

SETTINGS_KEY = "dllm"

# Returns the names of the other algorithms' settings, each with the sentence that refuses it. It is
# a function because only refusals need the names.
Others = Callable[[], Mapping[str, str]]


def names_of(
    cls: type[DllmSettings] | type[RequestOptions], parameters: Collection[str]
) -> set[str]:
    """The names that users may write: the fields of `cls` and an algorithm's `parameters`."""
    own = {f.name for f in fields(cls)} - {"parameters", "given"}
    return own | set(parameters)


def parse_settings(
    additional_config: object,
    parameters_of: Callable[[object], Collection[str]],
    others: Others = dict,
) -> DllmSettings:
    """Parse server settings from vLLM's ``additional_config``.

    ``{"dllm": {"config": "file.yaml"}}`` reads the same keys from a YAML file; keys given
    next to ``config`` override the file.

    Args:
        additional_config: the value of vLLM's option.
        parameters_of: called once with the requested algorithm (or None); returns the names of its
            settings.
        others: see `Others`.

    Raises:
        SettingsError: a key is unknown or stands outside the section, a value is out of range, or
            the file cannot be read.
    """
    whole = additional_config if isinstance(additional_config, Mapping) else {}
    section = whole.get(SETTINGS_KEY)
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise SettingsError(
            f"--additional-config: 'dllm' must be an object of settings, got {shown(section)}"
        )
    path, from_file = section.get("config"), {}
    if path is not None:
        from vllm_dllm.settings.file import read_settings_file

        from_file = read_settings_file(path)
    parameters = parameters_of(section.get("algorithm", from_file.get("algorithm")))
    known = names_of(DllmSettings, parameters)
    if whole.keys() - {SETTINGS_KEY} or (section.keys() | from_file.keys()) - known:
        from vllm_dllm.settings import unknown_names

        unknown_names.refuse_settings_outside(whole, lambda: {*known, "config", *others()})
        unknown_names.refuse_settings("dllm setting", section, known | {"config"}, others)
        unknown_names.refuse_settings(f"dllm setting in {path}:", from_file, known, others)
    DllmSettings(**_gathered(from_file, parameters))  # the file must be valid by itself
    values = {name: value for name, value in section.items() if name != "config"}
    chosen = from_file | values
    given = frozenset(name for name, value in chosen.items() if value is not None)
    return DllmSettings(**_gathered(chosen, parameters), given=given)


def parse_request_options(
    extra_args: Mapping[str, Any] | None, parameters: Collection[str], others: Others = dict
) -> RequestOptions:
    """Parse request options from ``SamplingParams.extra_args``.

    Keys without the prefix ``diffusion_`` are left to vLLM if it reads them, and refused otherwise.

    Args:
        extra_args: the extra arguments of a request.
        parameters: the names of the settings of the request's algorithm, without the prefix.
        others: see `Others`.

    Raises:
        SettingsError: a key is unknown, an option lacks its prefix, or a value is out of range.
    """
    given = extra_args or {}
    options = {
        name.removeprefix(REQUEST_PREFIX): value
        for name, value in given.items()
        if isinstance(name, str) and name.startswith(REQUEST_PREFIX)
    }
    known = names_of(RequestOptions, parameters)
    if len(options) < len(given) or options.keys() - known:
        from vllm_dllm.settings import unknown_names

        unknown_names.refuse_extra_arguments(given, lambda: {*known, *others()})
        unknown_names.refuse_options(options, known, others)
    return RequestOptions(**_gathered(options, parameters))


def _gathered(values: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Turn flat names into keyword arguments, with all algorithms' settings in one mapping."""
    own = {name: value for name, value in values.items() if name not in parameters}
    return own | {"parameters": {k: v for k, v in values.items() if k in parameters}}
