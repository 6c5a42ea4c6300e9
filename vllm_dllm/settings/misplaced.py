"""Settings and request options in places where nobody would read them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from vllm_dllm.settings.ranges import MOST_CHARACTERS, SettingsError, cut, shown
from vllm_dllm.settings.request import REQUEST_PREFIX

SETTINGS_KEY = "dllm"


def refuse_settings_outside(additional_config: object, settings: Collection[str]) -> None:
    """Refuse what was meant for the section ``dllm`` and stands beside it.

    All plugins and platforms of vLLM share ``additional_config``, so most of its other keys are
    somebody else's and are left alone. Refused are two kinds of keys that would be ignored: the
    exact name of one of our settings, and a name that nearly is ``dllm``. A setting that is both
    outside and misspelt cannot be told from another plugin's key.

    Args:
        additional_config: the value of vLLM's option.
        settings: the names of all settings, also those for other kinds of models.

    Raises:
        SettingsError: names the key, and shows where it belongs.
    """
    if not isinstance(additional_config, Mapping):
        return
    for key in misspelt_sections(additional_config):
        raise SettingsError(
            f"--additional-config: the key {shown(key)} is unknown; did you mean {SETTINGS_KEY!r}?"
        )
    for key, value in additional_config.items():
        if key in settings:
            raise SettingsError(
                f"--additional-config: {key!r} stands outside of {SETTINGS_KEY!r}, where nobody "
                f"reads it; write {_as_json({SETTINGS_KEY: {key: value}})}"
            )


def meant_by(
    fields: Mapping[str, object], settings: Collection[str], algorithms: Collection[str]
) -> dict[str, object]:
    """The server's settings that fields of other places, or of other engines, probably mean.

    Args:
        fields: names and values, such as ``{"diffusion_entropy_bound": 0.1}``.
        settings: the names of the settings that the server has.
        algorithms: the names of the algorithms that it has.
    """
    meant: dict[str, object] = {}
    folded = {name.casefold(): name for name in algorithms}
    for field, value in fields.items():
        name = field.rpartition(".")[2].removeprefix("diffusion_")
        algorithm = folded.get(str(value).replace("_", "").casefold())
        if name in ("algorithm", "sampler") and algorithm is not None:
            meant["algorithm"] = algorithm
        elif name in settings:
            meant[name] = value
    return meant


def as_option(settings: Mapping[str, object]) -> str:
    """How settings are given to a server."""
    return f"--additional-config '{_as_json({SETTINGS_KEY: settings})}'"


def misspelt_sections(additional_config: Iterable[object]) -> list[str]:
    """Keys that are probably misspelt forms of ``dllm``.

    They differ from it by one edit, by case, or by surrounding blanks.
    """
    return [key for key in additional_config if isinstance(key, str) and _nearly(key, SETTINGS_KEY)]


def refuse_options_without_prefix(
    extra_args: Mapping[str, object], options: Collection[str]
) -> None:
    """Refuse options of ours that a request gives without their prefix.

    Args:
        extra_args: the extra arguments of a request.
        options: the names of all options, without the prefix.

    Raises:
        SettingsError: names the option, and what it is called.
    """
    for name in extra_args:
        if name in options:
            raise SettingsError(
                f"vllm_xargs: nobody reads {name!r}; the option is {REQUEST_PREFIX + name!r}"
            )


def _as_json(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # offline, where values need not be JSON
        text = shown(value)
    return text if len(text) <= MOST_CHARACTERS else cut(text)


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
