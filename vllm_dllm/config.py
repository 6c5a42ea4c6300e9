"""Every setting of the package, in one place: names, ranges, defaults, parsing.

Nothing else reads an option string. Server settings come from
``--additional-config '{"dllm": {...}}'`` and request options from ``vllm_xargs`` (HTTP) or
``SamplingParams.extra_args`` (offline). An unknown key is an error that offers the nearest name.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

SETTINGS_KEY = "dllm"
REQUEST_PREFIX = "diffusion_"
DEFAULT_BLOCK_LENGTH = 32
MAX_SETTINGS_FILE_BYTES = 1 << 20
MAX_FLOAT32 = float.fromhex("0x1.fffffep+127")


class SettingsError(ValueError):
    """A setting has an unknown name or a value outside its range; the message names it."""


@dataclass(frozen=True)
class DllmSettings:
    """Server-wide settings (``additional_config["dllm"]``).

    Attributes:
        algorithm: decoding algorithm; None takes the model's own.
        threshold: confidence above which a position is decided (LowConfidence), at least 0;
            1 or more decides one position a step.
        max_steps: most denoise steps a block may take, at least 1; None is the block length
            plus one. The last one decides all that is left.
        eos_early_stop: finish a block once everything up to its first end-of-sequence
            token is decided. Changes the number of steps, never the output.
    """

    algorithm: str | None = None
    threshold: float = 0.95
    max_steps: int | None = None
    eos_early_stop: bool = True

    def __post_init__(self) -> None:
        if self.algorithm is not None and not isinstance(self.algorithm, str):
            raise SettingsError(f"dllm.algorithm must be a string, got {shown(self.algorithm)}")
        check_threshold("dllm.threshold", self.threshold)
        if self.max_steps is not None:
            check_steps("dllm.max_steps", self.max_steps)
        if not isinstance(self.eos_early_stop, bool):
            raise SettingsError(
                f"dllm.eos_early_stop must be true or false, got {shown(self.eos_early_stop)}"
            )


@dataclass(frozen=True)
class RequestOptions:
    """What one request may choose; None means the server's value.

    Attributes:
        threshold: as in `DllmSettings` (``diffusion_threshold``).
        max_steps: as in `DllmSettings` (``diffusion_max_steps``).
    """

    threshold: float | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_threshold("diffusion_threshold", self.threshold)
        if self.max_steps is not None:
            check_steps("diffusion_max_steps", self.max_steps)


@dataclass(frozen=True)
class EntropyBoundDefaults:
    """The sampler that a DiffusionGemma checkpoint names in ``generation_config.json``.

    Attributes:
        max_denoising_steps: most denoise steps of a canvas, at least 1.
        entropy_bound: nats that accepted positions may share, above 0 (``sampler_config``).
        t_min: temperature behind the last step, at least 0.
        t_max: temperature of the first step, above `t_min`.
        stability_threshold: steps for which the argmax canvas must stay the same, at least 0.
        confidence_threshold: mean entropy in nats below which a canvas may end, above 0.
    """

    max_denoising_steps: int
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float

    def __post_init__(self) -> None:
        check_steps("max_denoising_steps", self.max_denoising_steps)
        for name in ("entropy_bound", "t_min", "t_max", "confidence_threshold"):
            check_threshold(name, getattr(self, name))
        for name in ("entropy_bound", "confidence_threshold"):
            if getattr(self, name) == 0:
                raise SettingsError(f"{name} must be above 0")
        if self.t_max <= self.t_min:
            raise SettingsError(f"t_max must be above t_min={self.t_min}, got {self.t_max}")
        if self.stability_threshold != 0:
            check_steps("stability_threshold", self.stability_threshold)


def parse_generation_config(generation_config: Mapping[str, Any]) -> EntropyBoundDefaults:
    """DiffusionGemma's sampler fields out of ``generation_config.json``.

    Raises:
        SettingsError: a field is missing or outside its range; the message names it.
    """
    sampler = generation_config.get("sampler_config")
    if not isinstance(sampler, Mapping):
        raise SettingsError("generation_config.json has no 'sampler_config'")
    if sampler.get("_cls_name") != "EntropyBoundSamplerConfig":
        raise SettingsError(
            "generation_config.json: sampler_config._cls_name must be "
            f"'EntropyBoundSamplerConfig', got {shown(sampler.get('_cls_name'))}"
        )
    values: dict[str, Any] = {}
    for field in fields(EntropyBoundDefaults):
        inner = field.name == "entropy_bound"
        name = f"sampler_config.{field.name}" if inner else field.name
        values[field.name] = (sampler if inner else generation_config).get(field.name)
        if values[field.name] is None:
            raise SettingsError(f"generation_config.json has no {name!r}")
    try:
        return EntropyBoundDefaults(**values)
    except SettingsError as error:
        raise SettingsError(f"generation_config.json: {error}") from error


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def shown(value: object) -> str:
    """`repr` for an error message: short, and never an error itself."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write out a very long integer
        return f"a very large {type(value).__name__}"


def check_threshold(name: str, value: object) -> None:
    """A finite number, at least 0 and small enough for a float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingsError(f"{name} must be a number, got {shown(value)}")
    if not 0 <= value <= MAX_FLOAT32:  # also refuses nan
        raise SettingsError(
            f"{name} must be finite and at least 0 (and fit 32 bits), got {shown(value)}"
        )


def check_steps(name: str, value: object) -> None:
    """A whole number, at least 1 and small enough for an int32."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(f"{name} must be a whole number, got {shown(value)}")
    if not 1 <= value < 2**31:
        raise SettingsError(f"{name} must be at least 1 (and fit 32 bits), got {shown(value)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an error message: the closest known name, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def _reject_unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = set(known)
    for name in given:
        if name not in known:
            hint = nearest(name if isinstance(name, str) else "", known)
            raise SettingsError(f"unknown {kind} {shown(name)}; {hint}")


def parse_settings(additional_config: object) -> DllmSettings:
    """Server settings from vLLM's ``additional_config``.

    ``{"dllm": {"config": "file.yaml"}}`` reads the same keys from a YAML file; keys given
    beside ``config`` win over the file.

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
    known = [field.name for field in fields(DllmSettings)]
    _reject_unknown("dllm setting", section, [*known, "config"])
    values = dict(section)
    path = values.pop("config", None)
    if path is None:
        return DllmSettings(**values)
    from_file = _read_settings_file(path)
    _reject_unknown(f"dllm setting in {path}:", from_file, known)
    return replace(DllmSettings(**from_file), **values)


def _read_settings_file(path: object) -> dict[str, Any]:
    import yaml

    if not isinstance(path, str):
        raise SettingsError(f"dllm.config must be the path of a YAML file, got {shown(path)}")
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_SETTINGS_FILE_BYTES + 1)  # a device's size says nothing
        if len(raw) > MAX_SETTINGS_FILE_BYTES:
            raise SettingsError(
                f"dllm.config: {path} is larger than {MAX_SETTINGS_FILE_BYTES} bytes"
            )
        content = yaml.safe_load(raw.decode("utf-8"))
    except SettingsError:
        raise
    except Exception as error:  # bad scalars leave PyYAML as KeyError, IndexError, ...
        raise SettingsError(f"dllm.config: cannot read {path!r}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"dllm.config: {path} must hold a mapping of settings")
    return content


def parse_request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Request options out of ``SamplingParams.extra_args``.

    Keys without our prefix belong to somebody else and are left alone.

    Raises:
        SettingsError: unknown ``diffusion_*`` key, value out of range.
    """
    ours = {
        name: value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(REQUEST_PREFIX)
    }
    known = [REQUEST_PREFIX + field.name for field in fields(RequestOptions)]
    _reject_unknown("request option", ours, known)
    return RequestOptions(
        **{name.removeprefix(REQUEST_PREFIX): value for name, value in ours.items()}
    )
