"""Every setting of the package, in one place: names, ranges, defaults, parsing.

Nothing else reads an option string. Server settings come from
``--additional-config '{"dllm": {...}}'`` and request options from ``vllm_xargs`` (HTTP) or
``SamplingParams.extra_args`` (offline). An unknown key is an error that offers the nearest name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vllm_dllm.settings.file import read_settings_file
from vllm_dllm.settings.ranges import MAX_STEPS, Range, SettingsError, nearest, shown

SETTINGS_KEY = "dllm"
REQUEST_PREFIX = "diffusion_"
DEFAULT_BLOCK_LENGTH = 32
MAX_STEPS_FIELD = "max_denoising_steps"
WINDOWS = ("symmetric", "reference")
EXECUTIONS = ("fdfo", "sync")
KERNELS = ("torch", "triton")
STEPS = Range(least=1, most=MAX_STEPS, whole=True)
# Longest canvas, and longest list of a request: a list is read before it is known whether it fits.
MAX_CANVAS = 1 << 16
LENGTH = Range(least=1, most=MAX_CANVAS, whole=True)
POSITION = Range(whole=True)


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
        algorithm: decoding algorithm, with its preset; None takes the model's own.
        parameters: the algorithm's settings that were given, by name.
        max_steps: most denoise steps a canvas may take, at least 1; None is the checkpoint's
            (``max_denoising_steps``) or the algorithm's own. The last one decides the rest.
        execution: when a finished canvas leaves: ``fdfo`` (first done, first out) at once,
            ``sync`` when all canvases of the batch are done.
        eos_early_stop: finish a canvas once everything up to its first end-of-sequence token,
            or up to the last token that ``max_tokens`` lets out, is decided. Changes the number
            of steps, never the output. None is on for algorithms that never edit.
        skip_last_commit: emit the last canvas of a request without a forward pass over its final
            tokens, whose keys and values nobody would read. Never changes the output.
        fused_commit: a finished block leaves at once, and its keys and values are written in the
            pass that begins the next one. Never changes the output. None is on where it works.
        window: how a canvas sees sliding-window layers (DiffusionGemma), one of `WINDOWS`.
        kernels: what row statistics are computed with, one of `KERNELS`: PyTorch's operators, or
            this package's Triton kernels.
        request_step_limit: most steps that a request may ask for where a canvas' positions do not
            bound them (``diffusion_max_post_edit_steps``); None is 4 times the block length.
        given: the settings that somebody chose, be it the default.
    """

    algorithm: str | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    max_steps: int | None = None
    execution: str = "fdfo"
    eos_early_stop: bool | None = None
    skip_last_commit: bool = True
    fused_commit: bool | None = None
    window: str = "symmetric"
    kernels: str = "torch"
    request_step_limit: int | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if self.algorithm is not None and (
            not isinstance(self.algorithm, str) or not self.algorithm
        ):
            raise SettingsError(
                f"dllm.algorithm must be a string that names one, got {shown(self.algorithm)}"
            )
        if self.max_steps is not None:
            STEPS.check("dllm.max_steps", self.max_steps)
        if self.request_step_limit is not None:
            STEPS.check("dllm.request_step_limit", self.request_step_limit)
        choices_of = {"window": WINDOWS, "execution": EXECUTIONS, "kernels": KERNELS}
        for name, choices in choices_of.items():
            value = getattr(self, name)
            if value not in choices:
                raise SettingsError(
                    f"dllm.{name} must be one of {', '.join(choices)}, got {shown(value)}"
                )
        for name in ("eos_early_stop", "fused_commit"):
            if getattr(self, name) is not None:
                _check_flag(f"dllm.{name}", getattr(self, name))
        _check_flag("dllm.skip_last_commit", self.skip_last_commit)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SettingsError(f"{name} must be true or false, got {shown(value)}")


@dataclass(frozen=True)
class RequestOptions:
    """What one request may choose; None means the server's value.

    Attributes:
        algorithm: as in `DllmSettings`, but registered names only.
        parameters: as in `DllmSettings`, each with the prefix ``diffusion_``.
        max_steps: as in `DllmSettings`.
        seed_canvas: token ids that the first canvas starts from.
        pinned: positions of the seed canvas that keep their token.
        canvas_length: width of the request's canvases, at most the served one.
        read_only: one canvas is the whole answer; it leaves without a commit.
        constrained: only the request's ``logprob_token_ids`` may be chosen.
        stream_prefix: put out the decided beginning of an unfinished canvas.
    """

    algorithm: str | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    max_steps: int | None = None
    seed_canvas: Sequence[int] | None = None
    pinned: Sequence[int] | None = None
    canvas_length: int | None = None
    read_only: bool | int | None = None
    constrained: bool | int | None = None
    stream_prefix: bool | int | None = None

    def __post_init__(self) -> None:
        if self.algorithm is not None and (
            not isinstance(self.algorithm, str) or not self.algorithm or ":" in self.algorithm
        ):
            # A path would let a client import any module of the server.
            raise SettingsError(
                f"{REQUEST_PREFIX}algorithm must be a registered name, got {shown(self.algorithm)}"
            )
        for name, allowed in (("max_steps", STEPS), ("canvas_length", LENGTH)):
            if getattr(self, name) is not None:
                allowed.check(REQUEST_PREFIX + name, getattr(self, name))
        for name in ("seed_canvas", "pinned"):
            if getattr(self, name) is not None:
                check_whole_numbers(REQUEST_PREFIX + name, getattr(self, name))
        if self.pinned and self.seed_canvas is None:
            raise SettingsError("diffusion_pinned needs a diffusion_seed_canvas to hold")
        if len(self.pinned or ()) > len(self.seed_canvas or ()):
            raise SettingsError("diffusion_pinned has more positions than diffusion_seed_canvas")
        # vLLM's HTTP server narrows JSON booleans to 0 and 1.
        for name in ("read_only", "constrained", "stream_prefix"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, int)) or value not in (None, 0, 1):
                raise SettingsError(
                    f"{REQUEST_PREFIX}{name} must be true or false, got {shown(value)}"
                )


# DiffusionGemma's sampler, as its generation_config.json must state it.
SAMPLER_FIELDS = ("t_min", "t_max", "stability_threshold", "confidence_threshold")


def parse_sampler(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """DiffusionGemma's sampler out of ``generation_config.json``, with ``max_denoising_steps``.

    Raises:
        SettingsError: a field is missing; the message names it. Ranges are the algorithm's.
    """
    sampler = generation_config.get("sampler_config")
    if not isinstance(sampler, Mapping):
        raise SettingsError("generation_config.json has no 'sampler_config'")
    if sampler.get("_cls_name") != "EntropyBoundSamplerConfig":
        raise SettingsError(
            "generation_config.json: sampler_config._cls_name must be "
            f"'EntropyBoundSamplerConfig', got {shown(sampler.get('_cls_name'))}"
        )
    values: dict[str, Any] = {
        name: generation_config.get(name) for name in (MAX_STEPS_FIELD, *SAMPLER_FIELDS)
    }
    values["sampler_config.entropy_bound"] = sampler.get("entropy_bound")
    for name, value in values.items():
        if value is None:
            raise SettingsError(f"generation_config.json has no {name!r}")
    STEPS.check(f"generation_config.json: {MAX_STEPS_FIELD}", values[MAX_STEPS_FIELD])
    return {name.removeprefix("sampler_config."): value for name, value in values.items()}


def parse_checkpoint(
    generation_config: Mapping[str, Any], parameters: Collection[str]
) -> dict[str, float]:
    """What the ``generation_config.json`` of a masked model says about decoding, if anything.

    Its keys are an algorithm's settings and ``max_denoising_steps``; those of autoregressive
    decoding are somebody else's.

    Raises:
        SettingsError: ``max_denoising_steps`` is out of range; other ranges are the algorithm's.
    """
    known = (MAX_STEPS_FIELD, *parameters)
    stated = {name: generation_config[name] for name in known if name in generation_config}
    if MAX_STEPS_FIELD in stated:
        STEPS.check(f"generation_config.json: {MAX_STEPS_FIELD}", stated[MAX_STEPS_FIELD])
    return stated


def check_whole_numbers(name: str, values: object) -> None:
    """A list of whole numbers, none below 0, no longer than any canvas."""
    if not isinstance(values, (list, tuple)):
        raise SettingsError(f"{name} must be a list of whole numbers, got {shown(values)}")
    if len(values) > MAX_CANVAS:
        raise SettingsError(f"{name} has {len(values)} numbers, at most {MAX_CANVAS} are taken")
    for value in values:
        POSITION.check(name, value)


def refuse_canvas_options(options: RequestOptions) -> None:
    """Raise for an option about a noisy canvas where the model's canvases are masked."""
    for name in ("seed_canvas", "pinned", "canvas_length", "read_only", "constrained"):
        if getattr(options, name):
            raise SettingsError(
                f"{REQUEST_PREFIX}{name} is for models that denoise random tokens, which this "
                "one does not"
            )


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
