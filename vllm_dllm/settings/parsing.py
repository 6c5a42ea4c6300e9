"""The one parser of settings: what users wrote, as settings of a server or options of a request.

Nothing else reads an option string. Server settings come from
``--additional-config '{"dllm": {...}}'`` and request options from ``vllm_xargs`` (HTTP) or
``SamplingParams.extra_args`` (offline). An unknown key is an error that offers the nearest name.
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
    beside ``config`` win over the file. `parameters_with` names all algorithms' settings, given
    the algorithm that is asked for: one that is named by its path is unknown until then.

    Raises:
        SettingsError: unknown key, value out of range, unreadable file.
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
    """Keys of vLLM's ``additional_config`` that are one edit, case or blanks away from ours.

    They belong to nobody we know of, and the settings below them would be passed over.
    """
    keys = additional_config if isinstance(additional_config, Mapping) else ()
    return [key for key in keys if isinstance(key, str) and _nearly(key, SETTINGS_KEY)]


def _nearly(name: str, wanted: str) -> bool:
    """Whether names differ by case, blanks around them, or one letter (or two swapped ones)."""
    name, given = name.strip().lower()[: len(wanted) + 2], name
    if name == wanted:
        return given != wanted
    for at in range(len(wanted) + 1):
        before, behind = wanted[:at], wanted[at:]
        if name in (before + behind[1:], before + behind[1:2] + behind[:1] + behind[2:]):
            return True
        rest = name[at + 1 :]
        if name[:at] == before and len(name) > at and rest in (behind, behind[1:]):
            return True
    return False


def _names(
    cls: type[DllmSettings] | type[RequestOptions], parameters: Collection[str]
) -> list[str]:
    """The names that users write: `parameters` stands for each setting of an algorithm."""
    own = [f.name for f in fields(cls) if f.name not in ("parameters", "given")]
    return own + sorted(parameters)


def _gathered(values: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Users' flat names as keyword arguments, algorithms' settings collected in one mapping."""
    own = {name: value for name, value in values.items() if name not in parameters}
    return own | {"parameters": {k: v for k, v in values.items() if k in parameters}}


def parse_request_options(
    extra_args: Mapping[str, Any] | None, parameters: Collection[str]
) -> RequestOptions:
    """Request options out of ``SamplingParams.extra_args``; `parameters` as above.

    Keys without our prefix belong to somebody else and are left alone.

    Raises:
        SettingsError: unknown ``diffusion_*`` key, value out of range.
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
