"""Every setting of the package, in one place: names, ranges, defaults, parsing.

Nothing else reads an option string. Server settings come from
``--additional-config '{"dllm": {...}}'`` and request options from ``vllm_xargs`` (HTTP) or
``SamplingParams.extra_args`` (offline). An unknown key is an error that offers the nearest name.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

SETTINGS_KEY = "dllm"
REQUEST_PREFIX = "diffusion_"
DEFAULT_BLOCK_LENGTH = 32
MAX_SETTINGS_FILE_BYTES = 1 << 20
MAX_FLOAT32 = float.fromhex("0x1.fffffep+127")


WINDOWS = ("symmetric", "reference")


class SettingsError(ValueError):
    """A setting has an unknown name or a value outside its range; the message names it."""


def native_gemma() -> bool:
    """Whether ``VLLM_DLLM_NATIVE=1`` leaves DiffusionGemma to vLLM's own class.

    An environment variable, because models are registered before any option is read.

    Raises:
        SettingsError: the variable is neither 0 nor 1.
    """
    value = os.environ.get("VLLM_DLLM_NATIVE", "0")
    if value not in ("", "0", "1"):
        raise SettingsError(f"VLLM_DLLM_NATIVE must be 0 or 1, got {shown(value)}")
    return value == "1"


@dataclass(frozen=True)
class DllmSettings:
    """Server-wide settings (``additional_config["dllm"]``).

    Attributes:
        algorithm: decoding algorithm; None takes the model's own.
        parameters: the algorithm's parameters that were given, by name (see `PARAMETERS`).
        max_steps: most denoise steps a block may take, at least 1; None is the model's own (the
            block length plus one, or ``max_denoising_steps``). The last one decides the rest.
        eos_early_stop: finish a block once everything up to its first end-of-sequence
            token is decided. Changes the number of steps, never the output. None is on for
            the models that have it (LLaDA2).
        window: how a canvas sees sliding-window layers (DiffusionGemma), one of `WINDOWS`.
    """

    algorithm: str | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    max_steps: int | None = None
    eos_early_stop: bool | None = None
    window: str = "symmetric"

    def __post_init__(self) -> None:
        if self.algorithm is not None and not isinstance(self.algorithm, str):
            raise SettingsError(f"dllm.algorithm must be a string, got {shown(self.algorithm)}")
        check_parameters("dllm.", self.parameters)
        if self.max_steps is not None:
            check_steps("dllm.max_steps", self.max_steps)
        if self.window not in WINDOWS:
            raise SettingsError(
                f"dllm.window must be one of {', '.join(WINDOWS)}, got {shown(self.window)}"
            )
        if not isinstance(self.eos_early_stop, (bool, type(None))):
            raise SettingsError(
                f"dllm.eos_early_stop must be true or false, got {shown(self.eos_early_stop)}"
            )


@dataclass(frozen=True)
class RequestOptions:
    """What one request may choose; None means the server's value.

    Attributes:
        parameters: as in `DllmSettings`, each with the prefix ``diffusion_``.
        max_steps: as in `DllmSettings`.
        seed_canvas: token ids that the first canvas starts from.
        pinned: positions of the seed canvas that keep their token.
        canvas_length: width of the request's canvases, at most the served one.
        read_only: one canvas is the whole answer; it leaves without a commit.
        constrained: only the request's ``logprob_token_ids`` may be chosen.
    """

    parameters: Mapping[str, float] = field(default_factory=dict)
    max_steps: int | None = None
    seed_canvas: Sequence[int] | None = None
    pinned: Sequence[int] | None = None
    canvas_length: int | None = None
    read_only: bool | int | None = None
    constrained: bool | int | None = None

    def __post_init__(self) -> None:
        check_parameters(REQUEST_PREFIX, self.parameters)
        for name in ("max_steps", "canvas_length"):
            if getattr(self, name) is not None:
                check_steps(REQUEST_PREFIX + name, getattr(self, name))
        for name in ("seed_canvas", "pinned"):
            if getattr(self, name) is not None:
                check_whole_numbers(REQUEST_PREFIX + name, getattr(self, name))
        if self.pinned and self.seed_canvas is None:
            raise SettingsError("diffusion_pinned needs a diffusion_seed_canvas to hold")
        # vLLM's HTTP server narrows JSON booleans to 0 and 1.
        for name in ("read_only", "constrained"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, int)) or value not in (None, 0, 1):
                raise SettingsError(
                    f"{REQUEST_PREFIX}{name} must be true or false, got {shown(value)}"
                )


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
        check_parameters("", self.parameters())

    def parameters(self) -> dict[str, float]:
        """The parameters of `EntropyBound`, without the number of steps."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in PARAMETERS}


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
    for own in (f.name for f in fields(EntropyBoundDefaults)):
        inner = own == "entropy_bound"
        name = f"sampler_config.{own}" if inner else own
        values[own] = (sampler if inner else generation_config).get(own)
        if values[own] is None:
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


def check_positive(name: str, value: object) -> None:
    """A finite number above 0."""
    check_threshold(name, value)
    if value == 0:
        raise SettingsError(f"{name} must be above 0")


def check_steps(name: str, value: object, least: int = 1) -> None:
    """A whole number, at least `least` and small enough for an int32."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(f"{name} must be a whole number, got {shown(value)}")
    if not least <= value < 2**31:
        raise SettingsError(
            f"{name} must be at least {least} (and fit 32 bits), got {shown(value)}"
        )


def check_whole_numbers(name: str, values: object) -> None:
    """A list of whole numbers, none below 0."""
    if not isinstance(values, (list, tuple)):
        raise SettingsError(f"{name} must be a list of whole numbers, got {shown(values)}")
    for value in values:
        check_steps(name, value, least=0)


# Parameters of decoding algorithms: name -> the check that a value must pass.
# (threshold: decide what is surer than this, 1 or more decides one position a step.)
PARAMETERS: dict[str, Callable[[str, object], None]] = {
    "threshold": check_threshold,
    "entropy_bound": check_positive,
    "t_min": check_threshold,
    "t_max": check_positive,
    "stability_threshold": partial(check_steps, least=0),
    "confidence_threshold": check_positive,
}


def check_parameters(prefix: str, values: Mapping[str, object]) -> None:
    """Each value in its range, and the temperature schedule falling."""
    for name, value in values.items():
        PARAMETERS[name](prefix + name, value)
    low, high = values.get("t_min"), values.get("t_max")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and high <= low:
        raise SettingsError(f"{prefix}t_max must be above {prefix}t_min={low}, got {high}")


def refuse_canvas_options(options: RequestOptions) -> None:
    """Raise for an option about a noisy canvas where the model's canvases are masked."""
    for name in ("seed_canvas", "pinned", "canvas_length", "read_only", "constrained"):
        if getattr(options, name):
            raise SettingsError(
                f"{REQUEST_PREFIX}{name} is for models that denoise random tokens, which this "
                "one does not"
            )


def refuse_foreign(
    prefix: str, given: Iterable[str], algorithm: str, parameters: Iterable[str]
) -> None:
    """Raise for a parameter that the algorithm does not have: it would be ignored."""
    for name in given:
        if name not in parameters:
            own = ", ".join(sorted(prefix + own for own in parameters if own in PARAMETERS))
            raise SettingsError(
                f"{prefix}{name} is not a parameter of {algorithm}, which has {own}"
            )


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
    known = _names(DllmSettings)
    _reject_unknown("dllm setting", section, [*known, "config"])
    values = dict(section)
    path = values.pop("config", None)
    if path is None:
        return DllmSettings(**_gathered(values))
    from_file = _read_settings_file(path)
    _reject_unknown(f"dllm setting in {path}:", from_file, known)
    DllmSettings(**_gathered(from_file))  # the file must be right by itself
    return DllmSettings(**_gathered(from_file | values))


def _names(cls: type[DllmSettings] | type[RequestOptions]) -> list[str]:
    """The names that users write: `parameters` stands for each algorithm parameter."""
    return [f.name for f in fields(cls) if f.name != "parameters"] + list(PARAMETERS)


def _gathered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Users' flat names as keyword arguments, algorithm parameters collected in one mapping."""
    own = {name: value for name, value in values.items() if name not in PARAMETERS}
    return own | {"parameters": {k: v for k, v in values.items() if k in PARAMETERS}}


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
    _reject_unknown("request option", ours, [REQUEST_PREFIX + n for n in _names(RequestOptions)])
    return RequestOptions(
        **_gathered({name.removeprefix(REQUEST_PREFIX): value for name, value in ours.items()})
    )
