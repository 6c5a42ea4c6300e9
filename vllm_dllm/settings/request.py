"""The options of a request: their names, their ranges, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag

from vllm_dllm.ranges import Range, SettingsError, shown
from vllm_dllm.settings.server import CONSTRAINT_DEPTH, CONSTRAINT_TOKENS, STEPS

REQUEST_PREFIX = "diffusion_"
# The length of the longest canvas, and of the longest list in a request, because lists are checked
# before it is known whether they fit the served canvas.
MAX_CANVAS = 1 << 16
LENGTH = Range(least=1, most=MAX_CANVAS, whole=True)
# The names of the block length in ``config.json``.
LENGTHS = ("block_length", "canvas_length", "block_size")
POSITION = Range(whole=True)
NUMBERS = {
    "max_steps": STEPS,
    "canvas_length": LENGTH,
    "constraint_depth": CONSTRAINT_DEPTH,
    "constraint_tokens": CONSTRAINT_TOKENS,
}
# Options that ask what happened in the steps of an answer.
TRACING_OPTIONS = ("return_step_maps", "trace", "replay")
# Options that are true or false.
FLAGS = ("read_only", "constrained", "stream_prefix", *TRACING_OPTIONS)

# Options that have an effect only in requests with a constraint.
CONSTRAINT_OPTIONS = ("diffusion_constraint_depth", "diffusion_constraint_tokens")


class Asked(IntFlag):
    """What a request wants to know about its steps; `LIVE` is what its server wants to know."""

    NOTHING = 0
    STEP_MAPS = 1
    TRACE = 2
    REPLAY = 4
    LIVE = 8


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request; None means that the server's value applies.

    Attributes:
        algorithm: as in `DllmSettings`, but only registered names.
        parameters: as in `DllmSettings`, each with the prefix ``diffusion_``.
        max_steps: as in `DllmSettings`.
        seed_canvas: token ids that the first canvas starts from.
        pinned: positions of the seed canvas that keep their token.
        canvas_length: width of the request's canvases, at most the served one.
        read_only: a single canvas is the whole answer and leaves without a commit.
        constrained: only the request's ``logprob_token_ids`` may be chosen.
        stream_prefix: output the decided beginning of an unfinished canvas.
        constraint_depth: as in `DllmSettings`.
        constraint_tokens: as in `DllmSettings`.
        return_step_maps: return the step in which each token was decided.
        trace: return what every pass over the canvases decided.
        replay: return what replays the answer, its whole last canvas included.
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
    constraint_depth: int | None = None
    constraint_tokens: int | None = None
    return_step_maps: bool | int | None = None
    trace: bool | int | None = None
    replay: bool | int | None = None

    def __post_init__(self) -> None:
        if self.algorithm is not None and (
            not isinstance(self.algorithm, str) or not self.algorithm or ":" in self.algorithm
        ):
            # A path would let a client import any module of the server.
            raise SettingsError(
                f"{REQUEST_PREFIX}algorithm must be a registered name such as EntropyBound, got "
                f"{shown(self.algorithm)}"
            )
        for name, allowed in NUMBERS.items():
            if getattr(self, name) is not None:
                allowed.check(REQUEST_PREFIX + name, getattr(self, name))
        for name in ("seed_canvas", "pinned"):
            if getattr(self, name) is not None:
                check_whole_numbers(REQUEST_PREFIX + name, getattr(self, name))
        if self.pinned and self.seed_canvas is None:
            raise SettingsError("diffusion_pinned needs a diffusion_seed_canvas to hold")
        if len(self.pinned or ()) > len(self.seed_canvas or ()):
            raise SettingsError(
                "diffusion_pinned must have no more positions than diffusion_seed_canvas"
            )
        # vLLM's HTTP server narrows JSON booleans to 0 and 1.
        for name in FLAGS:
            value = getattr(self, name)
            if not (value is None or isinstance(value, int)) or value not in (None, 0, 1):
                raise SettingsError(
                    f"{REQUEST_PREFIX}{name} must be true or false, got {shown(value)}"
                )
        if self.replay and self.stream_prefix:
            raise SettingsError(
                "diffusion_replay needs the whole last canvas, and with diffusion_stream_prefix an "
                "answer ends before that is decided; remove one of them"
            )


def refuse_misplaced_constraint_options(
    options: RequestOptions, constrained: bool, own_maximum: bool
) -> None:
    """Refuse options of a constraint that would have no effect.

    Args:
        options: the request's options.
        constrained: whether the request has a constraint.
        own_maximum: whether the request itself sets its maximum number of output tokens.

    Raises:
        SettingsError: an option would have no effect; the message names it.
    """
    for name in CONSTRAINT_OPTIONS:
        if getattr(options, name.removeprefix(REQUEST_PREFIX)) is not None and not constrained:
            raise SettingsError(
                f"{name} is for requests with a constraint (structured_outputs, "
                "response_format or tools), and this one has none; remove it"
            )
    if options.constraint_tokens is not None and own_maximum:
        raise SettingsError(
            f"{REQUEST_PREFIX}constraint_tokens is for requests without max_tokens, which says "
            "already how many tokens may be generated (at /v1/completions it is 16 by default); "
            "remove one of them"
        )


def check_whole_numbers(name: str, values: object) -> None:
    """Check that `values` is a list of non-negative integers, at most as long as a canvas may be.

    Raises:
        SettingsError: it is not; the message names the option.
    """
    if not isinstance(values, (list, tuple)):
        raise SettingsError(f"{name} must be a list of whole numbers, got {shown(values)}")
    if len(values) > MAX_CANVAS:
        raise SettingsError(f"{name} has {len(values)} numbers, at most {MAX_CANVAS} are taken")
    for value in values:
        POSITION.check(name, value)


def refuse_canvas_options(options: RequestOptions) -> None:
    """Raise `SettingsError` for options that only models with uniform noise have."""
    for name in ("seed_canvas", "pinned", "canvas_length", "read_only", "constrained"):
        if getattr(options, name):
            raise SettingsError(
                f"{REQUEST_PREFIX}{name} is for models that denoise random tokens "
                "(DiffusionGemma), which this one does not; remove it"
            )
