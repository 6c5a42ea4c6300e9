"""Parse what users write: the settings of a server, and the options of a request.

A request's options are passed on as a mapping of names without the prefix to checked values; those
that are None are left out, because the server's value applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_dllm.decoding import Corruption
from vllm_dllm.ranges import Range, SettingsError, shown
from vllm_dllm.settings.resolution import (
    REQUEST,
    REQUEST_PREFIX,
    SERVER,
    TRACING_OPTIONS,
    ResolvedDecoding,
    Served,
    named_algorithm,
)
from vllm_dllm.settings.server import (
    LENGTH,
    MAX_CANVAS,
    NAMES,
    OF_REQUESTS,
    SETTINGS_KEY,
    DllmSettings,
)

# Options that have an effect only in requests with a constraint.
CONSTRAINT_OPTIONS = ("constraint_depth", "constraint_tokens")
# Options of models with uniform noise; `read_only` is one of masked models, too. `canvas_length` is
# at most the served one.
CANVAS_OPTIONS: Mapping[str, Range | type] = {
    "seed_canvas": list,
    "pinned": list,
    "canvas_length": LENGTH,
    "read_only": bool,
    "constrained": bool,
}
# All options but the settings of algorithms.
OPTIONS: Mapping[str, Range | type] = {
    "algorithm": str,
    "stream_prefix": bool,
    **OF_REQUESTS,
    **dict.fromkeys(TRACING_OPTIONS, bool),
    **CANVAS_OPTIONS,
}
POSITION = Range(whole=True)


def parse_settings(
    additional_config: object, corruption: Corruption, own_algorithm: str
) -> DllmSettings:
    """Parse server settings from vLLM's ``additional_config``, ``{"dllm": {...}}``.

    Raises `SettingsError` if a key is unknown or stands outside the section, or a value is out of
    range. An unknown algorithm is reported before its settings.
    """
    whole = additional_config if isinstance(additional_config, Mapping) else {}
    section = whole.get(SETTINGS_KEY)
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise SettingsError(
            f"--additional-config: 'dllm' must be an object of settings, got {shown(section)}"
        )
    name = section.get("algorithm")
    if not isinstance(name, str) or not name:
        name = own_algorithm
    algorithm, _ = named_algorithm(name, corruption, SERVER)
    parameters = section.keys() & algorithm.config.ranges().keys()
    own = section.keys() - parameters
    if whole.keys() - {SETTINGS_KEY} or own - NAMES:
        from vllm_dllm.settings.unknown_names import refuse_settings

        refuse_settings(whole, section, algorithm)
    if section.get("threshold_under_load") is not None:
        if "threshold" not in algorithm.config.ranges():
            raise SettingsError(
                f"dllm.threshold_under_load: {algorithm.name} has no setting 'threshold'; remove "
                "it, or choose another dllm.algorithm"
            )
        if "threshold" in parameters:
            raise SettingsError(
                "dllm.threshold and dllm.threshold_under_load exclude each other; remove one of "
                "them"
            )
    return DllmSettings(
        **{name: section[name] for name in own},
        parameters={name: section[name] for name in parameters},
    )


def parse_options(extra_args: Mapping[str, Any], served: Served) -> dict[str, Any]:
    """Parse the options in a request's ``vllm_xargs`` or ``SamplingParams.extra_args``.

    Keys without the prefix ``diffusion_`` are left to vLLM, unless they look like options. The
    ranges of the algorithm's settings are checked where they are resolved. Raises `SettingsError`;
    an algorithm that does not fit the model is reported before its settings.
    """
    given = {
        name.removeprefix(REQUEST_PREFIX): value
        for name, value in extra_args.items()
        if isinstance(name, str) and name.startswith(REQUEST_PREFIX)
    }
    name = given.get("algorithm")
    if not isinstance(name, str) or not name or ":" in name:
        name = served.settings.algorithm or served.own_algorithm
    algorithm, _ = named_algorithm(name, served.corruption, REQUEST)
    parameters = algorithm.config.ranges().keys()
    if len(given) < len(extra_args) or given.keys() - parameters - OPTIONS.keys():
        from vllm_dllm.settings.unknown_names import refuse_options

        refuse_options(extra_args, algorithm)
    options = {n: value for n, value in given.items() if value is not None or n in parameters}
    for name, value in options.items():
        if name not in parameters:
            _check(REQUEST_PREFIX + name, value, OPTIONS[name])
    if options.get("pinned") and "seed_canvas" not in options:
        raise SettingsError("diffusion_pinned needs a diffusion_seed_canvas to hold")
    if len(options.get("pinned", ())) > len(options.get("seed_canvas", ())):
        raise SettingsError(
            "diffusion_pinned must have no more positions than diffusion_seed_canvas"
        )
    if options.get("replay") and options.get("stream_prefix"):
        raise SettingsError(
            "diffusion_replay needs the whole last canvas, and with diffusion_stream_prefix an "
            "answer ends before that is decided; remove one of them"
        )
    return options


def _check(name: str, value: object, allowed: Range | type) -> None:
    """Raise `SettingsError` unless the option `name` takes the value, see `OPTIONS`."""
    if isinstance(allowed, Range):
        allowed.check(name, value)
    elif allowed is bool:
        # vLLM's HTTP server narrows JSON booleans to 0 and 1.
        if not isinstance(value, int) or value not in (0, 1):
            raise SettingsError(f"{name} must be true or false, got {shown(value)}")
    elif allowed is list:
        if not isinstance(value, (list, tuple)):
            raise SettingsError(f"{name} must be a list of whole numbers, got {shown(value)}")
        if len(value) > MAX_CANVAS:
            raise SettingsError(f"{name} has {len(value)} numbers, at most {MAX_CANVAS} are taken")
        for one in value:
            POSITION.check(name, one)
    elif not isinstance(value, str) or not value or ":" in value:
        # A path would let a client import any module of the server.
        raise SettingsError(
            f"{name} must be a registered name such as EntropyBound, got {shown(value)}"
        )


def refuse_without_effect(
    options: Mapping[str, Any],
    decoding: ResolvedDecoding,
    masked: bool,
    constrained: bool,
    own_maximum: bool,
    tokens: int | None,
) -> None:
    """Refuse options that would have no effect in a request, or a wrong one.

    `own_maximum` says whether the request itself sets ``max_tokens``, which is `tokens`; `masked`
    whether the model is a masked one.
    """
    for name in CONSTRAINT_OPTIONS:
        if name in options and not constrained:
            raise SettingsError(
                f"{REQUEST_PREFIX}{name} is for requests with a constraint (structured_outputs, "
                "response_format or tools), and this one has none; remove it"
            )
    if "constraint_tokens" in options and own_maximum:
        raise SettingsError(
            f"{REQUEST_PREFIX}constraint_tokens is for requests without max_tokens, which says "
            "already how many tokens may be generated (at /v1/completions it is 16 by default); "
            "remove one of them"
        )
    if masked and options.get("read_only") and tokens != 1:
        raise SettingsError(
            "diffusion_read_only reads one position of a masked model, the first after the prompt; "
            "set max_tokens to 1"
        )
    for name in CANVAS_OPTIONS.keys() - {"read_only"}:
        if masked and options.get(name):
            raise SettingsError(
                f"{REQUEST_PREFIX}{name} is for models that denoise random tokens "
                "(DiffusionGemma), which this one does not; remove it"
            )
    if options.get("stream_prefix") and decoding.algorithm.edits:
        raise SettingsError(
            f"diffusion_stream_prefix: {decoding.algorithm.name} may still change what it has "
            "decided; remove it" + (", or choose another diffusion_algorithm" if masked else "")
        )
