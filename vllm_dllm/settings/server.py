"""Server-wide settings with their names, ranges and defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm_dllm.ranges import MAX_STEPS, Range, SettingsError, nearest, shown

# The section of --additional-config that has the settings.
SETTINGS_KEY = "dllm"
DEFAULT_BLOCK_LENGTH = 32
# The length of the longest canvas.
MAX_CANVAS = 1 << 16
LENGTH = Range(least=1, most=MAX_CANVAS, whole=True)
# The names of the block length in ``config.json``.
LENGTHS = ("block_length", "canvas_length", "block_size", "bd_size")
# When a finished block's keys and values are written, see `startup.commit_choice`.
SEPARATE, GRANTED, TWO_BLOCKS = "separate", "granted", "two blocks"
# The values that YAML reads from on, off, or nothing.
UNQUOTED = ((True, "on"), (False, "off"), (None, "auto"))
STEPS = Range(least=1, most=MAX_STEPS, whole=True)
# The keys of `ThresholdUnderLoad`, as users write them.
UNDER_LOAD = {
    "from": Range(most=1.0),
    "to": Range(most=1.0),
    "at_requests": Range(least=2, whole=True),
}


def native_gemma() -> bool:
    """Whether ``VLLM_DLLM_NATIVE=1`` leaves DiffusionGemma to vLLM's own class.

    This is an environment variable because models are registered before any option is read.
    """
    value = os.environ.get("VLLM_DLLM_NATIVE", "0")
    if value not in ("", "0", "1"):
        raise SettingsError(f"VLLM_DLLM_NATIVE must be 0 or 1, got {shown(value)}")
    return value == "1"


@dataclass(frozen=True)
class ThresholdUnderLoad:
    """A threshold that follows the number of requests in a step, as in DiLaServe (2606.29094).

    Attributes:
        alone: the threshold of a step with one request, ``from``.
        busy: the threshold of a step with `at_requests` or more, ``to``.
        at_requests: this number; between the two the threshold is interpolated.
    """

    alone: float
    busy: float
    at_requests: int

    @classmethod
    def parse(cls, given: object) -> ThresholdUnderLoad:
        """Parse what users write; raises `SettingsError`."""
        name = "dllm.threshold_under_load"
        if not isinstance(given, Mapping):
            raise SettingsError(f"{name} must be an object, got {shown(given)}")
        for key in given.keys() - UNDER_LOAD.keys():
            hint = nearest(str(key), UNDER_LOAD)
            raise SettingsError(f"unknown key {shown(key)} of {name}; {hint}")
        for key, allowed in UNDER_LOAD.items():
            allowed.check(f"{name}.{key}", given.get(key))
        return cls(*(given[key] for key in UNDER_LOAD))

    def at(self, requests: int) -> float:
        """The threshold of a step with so many requests, to millionths."""
        share = min(1.0, max(0, requests - 1) / (self.at_requests - 1))
        return round(self.alone + (self.busy - self.alone) * share, 6)

    def __str__(self) -> str:
        return f"{self.alone:g} to {self.busy:g} at {self.at_requests}"


Allowed = Range | tuple[str, ...] | type[bool]


def _setting(default: Any, allowed: Allowed, of_requests: bool = False) -> Any:
    """A field of `DllmSettings`; None is allowed if it is the default.

    `of_requests` says whether requests have an option of this name, too.
    """
    return field(default=default, metadata={"allowed": allowed, "of_requests": of_requests})


@dataclass(frozen=True)
class DllmSettings:
    """Server-wide settings (``additional_config["dllm"]``)."""

    # The decoding algorithm, with its preset; None takes the model's own.
    algorithm: str | None = None
    # The algorithm's settings that were given, by name.
    parameters: Mapping[str, float] = field(default_factory=dict)
    # The most denoise steps of a canvas, the last of which decides all remaining positions. None
    # takes the checkpoint's number (``max_denoising_steps``) or else the algorithm's.
    max_steps: int | None = _setting(None, STEPS, of_requests=True)
    # When a finished canvas leaves: ``fdfo`` (first done, first out) at once, ``sync`` when all
    # canvases of the batch are done.
    execution: str = _setting("fdfo", ("fdfo", "sync"))
    # Finish a canvas once everything up to its first end-of-sequence token, or the last token that
    # ``max_tokens`` allows, is decided. None means on for algorithms that never edit.
    eos_early_stop: bool | None = _setting(None, bool)
    # Emit the last canvas of a request without a pass for keys and values that nobody reads.
    skip_last_commit: bool = _setting(True, bool)
    # With ``on`` a finished block leaves at once, and its keys and values are written in passes
    # that denoise the next one. ``auto`` does so where it costs next to nothing.
    fused_commit: str = _setting("auto", ("auto", "on", "off"))
    # The most forward passes in a step of vLLM; None (``auto``) means as many as pay.
    passes_per_step: int | None = _setting(None, Range(least=1, most=64, whole=True))
    # How a canvas sees sliding-window layers (DiffusionGemma).
    window: str = _setting("symmetric", ("symmetric", "reference"))
    # What computes row statistics: PyTorch's operators, this package's Triton kernels, or
    # (``auto``) the kernels on CUDA where they pass a self-test, and the operators elsewhere.
    kernels: str = _setting("auto", ("auto", "torch", "triton"))
    # The most steps that a request may ask for where a canvas' positions do not bound them
    # (``diffusion_max_post_edit_steps``); None means 4 times the block length.
    request_step_limit: int | None = _setting(None, STEPS)
    # How deeply calls of a constraint's rules may nest, and so how deeply the offered texts nest.
    # None means `CompileLimits.calls`.
    constraint_depth: int | None = _setting(
        None, Range(least=16, most=1024, whole=True), of_requests=True
    )
    # The most tokens of a constrained output whose request sets no ``max_tokens``, but at least as
    # many as the shortest output takes.
    constraint_tokens: int = _setting(2048, Range(least=1, whole=True), of_requests=True)
    # The threshold of requests that set none, or None if it is constant. Written as a mapping of
    # `UNDER_LOAD`.
    threshold_under_load: ThresholdUnderLoad | None = None
    # How many consecutive blocks a canvas holds, see `decoding.blocks`.
    blocks: int = _setting(1, Range(least=1, most=64, whole=True), of_requests=True)
    # The share of a block that is decided when the next one opens. None means
    # `decoding.blocks.ADD_BLOCK`.
    blocks_open_at: float | None = _setting(None, Range(most=1.0))

    def __post_init__(self) -> None:
        given: object = self.fused_commit
        words = (word for value, word in UNQUOTED if given is value)
        object.__setattr__(self, "fused_commit", next(words, given))
        passes: object = self.passes_per_step
        object.__setattr__(self, "passes_per_step", None if passes == "auto" else passes)
        name: object = self.algorithm
        if name is not None and (not isinstance(name, str) or not name):
            raise SettingsError(
                f"dllm.algorithm must be a string that names one, got {shown(name)}"
            )
        load: object = self.threshold_under_load
        if load is not None and not isinstance(load, ThresholdUnderLoad):
            object.__setattr__(self, "threshold_under_load", ThresholdUnderLoad.parse(load))
        for one in fields(self):
            called, value = f"dllm.{one.name}", getattr(self, one.name)
            allowed: Allowed | None = one.metadata.get("allowed")
            if allowed is None or (value is None and one.default is None):
                continue
            if isinstance(allowed, Range):
                allowed.check(called, value)
            elif isinstance(allowed, tuple) and value not in allowed:
                raise SettingsError(
                    f"{called} must be one of {', '.join(allowed)}, got {shown(value)}"
                )
            elif allowed is bool and not isinstance(value, bool):
                raise SettingsError(f"{called} must be true or false, got {shown(value)}")
        if self.blocks_open_at is not None and self.blocks == 1:
            raise SettingsError(
                "dllm.blocks_open_at has no effect with one block at a time; remove it, or set "
                "dllm.blocks"
            )


NAMES = frozenset(one.name for one in fields(DllmSettings)) - {"parameters"}
# The settings that requests have as options, too.
OF_REQUESTS: Mapping[str, Range] = {
    one.name: one.metadata["allowed"]
    for one in fields(DllmSettings)
    if one.metadata.get("of_requests")
}
