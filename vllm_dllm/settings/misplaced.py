"""Find settings and request options whose place or name would make vLLM ignore them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from vllm_dllm.ranges import MOST_CHARACTERS, SettingsError, closest, cut, shown
from vllm_dllm.settings.request import REQUEST_PREFIX

SETTINGS_KEY = "dllm"
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


def refuse_settings_outside(additional_config: object, settings: Collection[str]) -> None:
    """Refuse keys that were meant for the section ``dllm`` but stand next to it.

    All plugins and platforms of vLLM share ``additional_config``, so most of its other keys belong
    to others and are left alone. Three kinds of keys that would be ignored are refused: the exact
    name of one of our settings, a name that is almost ``dllm``, and any name that begins with
    ``dllm_``. A misspelt setting outside the section cannot be distinguished from another plugin's
    key.

    Args:
        additional_config: the value of vLLM's option.
        settings: the names of all settings, including those for other kinds of models.

    Raises:
        SettingsError: there is such a key; the message names it and shows where it belongs.
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
                f"--additional-config: {key!r} is outside of {SETTINGS_KEY!r}, where it is "
                f"ignored; write {_as_json({SETTINGS_KEY: {key: value}})}"
            )
        if isinstance(key, str) and key.startswith(OTHERS_PREFIX):
            raise SettingsError(
                f"--additional-config: {shown(key)} is not a setting of vllm-dllm, whose settings "
                f'are in {{"{SETTINGS_KEY}": {{...}}}}; {_our_name(key, settings, "")}'
            )


def meant_by(
    fields: Mapping[str, object], settings: Collection[str], algorithms: Collection[str]
) -> dict[str, object]:
    """The server's settings that fields of other places or engines probably stand for.

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
    """How a user gives settings to a server."""
    return f"--additional-config '{_as_json({SETTINGS_KEY: settings})}'"


def misspelt_sections(additional_config: Iterable[object]) -> list[str]:
    """Keys that are probably misspelt forms of ``dllm``.

    They differ from it by one edit, by case, or by surrounding blanks.
    """
    return [key for key in additional_config if isinstance(key, str) and _nearly(key, SETTINGS_KEY)]


def refuse_unknown_extra_arguments(
    extra_args: Mapping[str, object], options: Collection[str]
) -> None:
    """Refuse extra arguments of a request that neither this package nor vLLM reads.

    Args:
        extra_args: the extra arguments of a request.
        options: the names of all options, without the prefix.

    Raises:
        SettingsError: there is such an argument; the message names it, and the option's name here.
    """
    for name in extra_args:
        if isinstance(name, str) and (name.startswith(REQUEST_PREFIX) or name in VLLMS_OWN):
            continue
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


def _nearly(name: str, key: str) -> bool:
    """Whether two names differ only by case, surrounding blanks, one letter, or one swap."""
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
