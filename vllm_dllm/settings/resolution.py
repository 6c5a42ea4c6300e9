"""Resolve settings: request options override server settings, which override the checkpoint's.

The process that receives a request does so once (`Served.choose`). The workers find the result, a
`ResolvedRequest`, among the extra arguments that vLLM itself reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Any

from vllm_dllm.decoding import Algorithm, Corruption, get_algorithm
from vllm_dllm.decoding.base import Beside, EditTokens
from vllm_dllm.decoding.registry import registered_names
from vllm_dllm.ranges import AlgorithmConfig, SettingsError, shown
from vllm_dllm.settings.server import SEPARATE, STEPS, TWO_BLOCKS, DllmSettings

# The prefix of a request's options.
REQUEST_PREFIX = "diffusion_"
# Keys of a request's extra arguments. Users cannot set them, because they are not request options.
RESOLVED, AUTOMATON = "diffusion_resolved", "diffusion_automaton"
# vLLM treats temperatures below this as greedy.
GREEDY_EPSILON = 1e-5

REQUEST, SERVER, CHECKPOINT, DEFAULT = "request", "server", "checkpoint", "default"
# The options that replace the checkpoint's generation config, and that override its fields.
FOLDER, OVERRIDE = "--generation-config", "--override-generation-config"
HF_OVERRIDES = "--hf-overrides"
# Fields of a generation config: the cap on a canvas' steps, and DiffusionGemma's sampler.
MAX_STEPS_FIELD = "max_denoising_steps"
SAMPLER_FIELDS = ("t_min", "t_max", "stability_threshold", "confidence_threshold")
SAMPLER, BOUND = "sampler_config", "entropy_bound"
# The prefix with which an error message names a setting, by where the value came from.
PREFIXES = {
    REQUEST: REQUEST_PREFIX,
    SERVER: "dllm.",
    CHECKPOINT: "generation_config.json: ",
    FOLDER: f"{FOLDER}: ",
    OVERRIDE: f"{OVERRIDE}: ",
}


class StepDetails(IntFlag):
    """The details of its steps that a request, or for `LIVE` its server, asks for."""

    NOTHING = 0
    STEP_MAPS = 1
    TRACE = 2
    REPLAY = 4
    LIVE = 8


# Options that ask what happened in the steps of an answer.
TRACING_OPTIONS = {
    "return_step_maps": StepDetails.STEP_MAPS,
    "trace": StepDetails.TRACE,
    "replay": StepDetails.REPLAY,
}
# Options that `ResolvedRequest` has as they are given, and those that are true or false.
AS_GIVEN = ("seed_canvas", "pinned", "constraint_depth", "constraint_tokens")
FLAGS = ("read_only", "constrained", "stream_prefix")


def named_algorithm(
    name: str, corruption: Corruption, source: str
) -> tuple[Algorithm, dict[str, float]]:
    """`get_algorithm` for a name from this source; its errors name the setting, too."""
    try:
        return get_algorithm(name, corruption)
    except SettingsError as error:
        raise SettingsError(f"{PREFIXES[source]}algorithm: {error}") from error


@dataclass(frozen=True)
class ResolvedDecoding:
    """How the canvases of a request are decoded.

    Attributes:
        max_steps: cap on the denoise steps of a canvas.
        schedule_steps: number of steps that a temperature schedule is spread over.
        blocks: how many unfinished blocks may be open in one pass.
        sources: where each setting, ``algorithm`` and ``max_steps`` come from, by name.
        follows_load: whether its threshold is that of `DllmSettings.threshold_under_load`.
    """

    algorithm: Algorithm
    settings: AlgorithmConfig
    max_steps: int
    schedule_steps: int
    blocks: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)
    follows_load: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether this package provides the algorithm, and so knows more than its methods."""
        return type(self.algorithm).__module__.startswith("vllm_dllm.")


@dataclass(frozen=True)
class Served:
    """The decoding settings of a served model, known to the front end and to the workers.

    Attributes that are not explained here are those of `Family`.

    Attributes:
        own_algorithm: the decoding algorithm that the model's authors use.
        settings: the server's settings.
        checkpoint: settings and ``max_denoising_steps`` of the generation config, by name.
        elsewhere: by name, the source (`FOLDER` or `OVERRIDE`) of those that are not from the
            checkpoint itself.
        length: L, the block length.
        max_steps: the server's cap on the denoise steps of a canvas, or None.
        mask_token: the token that fills a fresh canvas; None for uniform noise.
        commits: when a finished block's keys and values are written: `SEPARATE`, `GRANTED` or
            `TWO_BLOCKS`.
    """

    corruption: Corruption
    own_algorithm: str
    settings: DllmSettings
    checkpoint: Mapping[str, float] = field(default_factory=dict)
    length: int = 32
    max_steps: int | None = None
    mask_token: int | None = None
    commits: str = SEPARATE
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    excludes: frozenset[Beside] = frozenset()
    verifies: bool = False
    edit_tokens: EditTokens | None = None
    usual: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    end_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        if MAX_STEPS_FIELD in self.checkpoint:
            prefix = PREFIXES[self._source(MAX_STEPS_FIELD)]
            STEPS.check(prefix + MAX_STEPS_FIELD, self.checkpoint[MAX_STEPS_FIELD])

    def _source(self, name: str) -> str:
        return self.elsewhere.get(name, CHECKPOINT)

    @property
    def algorithm_names(self) -> list[str]:
        """The registered algorithms that requests may choose; presets are not listed separately."""
        return registered_names(self.corruption)

    @property
    def two_blocks(self) -> bool:
        """Whether a step over a canvas also reads the block before it."""
        return self.commits == TWO_BLOCKS

    @property
    def window_length(self) -> int:
        """The number of positions that a step over a canvas reads; vLLM's count of draft tokens."""
        return self.length * (2 if self.two_blocks else self.settings.blocks)

    def accepts(self, algorithm: str) -> bool:
        """Whether a request may choose an algorithm."""
        try:
            self.choose({"algorithm": algorithm})
        except SettingsError:
            return False
        return True

    def choose(self, options: Mapping[str, Any] | None = None) -> ResolvedDecoding:
        """Resolve the settings of a request with these options.

        The order of precedence is request, server, generation config, the algorithm's default. A
        preset's values count as given at the place that names the preset, but explicit values at
        the same place override them. A family's own algorithm and preset are defaults. Raises
        `SettingsError` if the algorithm does not fit the model, or a value is out of range.
        """
        asked = options or {}
        chooser = REQUEST if "algorithm" in asked else SERVER
        name = asked.get("algorithm") or self.settings.algorithm or self.own_algorithm
        algorithm, preset = named_algorithm(name, self.corruption, chooser)
        if algorithm.verifies and not self.verifies:
            raise SettingsError(
                f"{PREFIXES[chooser]}algorithm: {algorithm.name} verifies its drafts with a causal "
                "pass, and this model has none; choose another algorithm"
            )
        if algorithm.moves and self.edit_tokens is None:
            raise SettingsError(
                f"{PREFIXES[chooser]}algorithm: {algorithm.name} is for models that delete and "
                "insert tokens (LLaDA2.2); choose another"
            )
        blocks = self._open_blocks(algorithm, chooser, asked)
        by_default = chooser == SERVER and self.settings.algorithm is None
        # The preset of a family's own algorithm is what the checkpoint may change.
        ranges, values = algorithm.config.ranges(), dict(self.usual.get(algorithm.name, {}))
        values |= preset if by_default else {}
        sources = dict.fromkeys(ranges, DEFAULT)
        layers = [(self._source(name), {name: value}) for name, value in self.checkpoint.items()]
        own, load = self.settings.parameters, self.settings.threshold_under_load
        if load is not None:
            own = {**own, "threshold": load.alone}
        for source, layer in ((SERVER, own), (REQUEST, asked)):
            layers += [(source, preset)] if source == chooser and not by_default else []
            layers.append((source, dict(layer)))
        for source, layer in layers:
            given = {name: value for name, value in layer.items() if name in ranges}
            for name, value in given.items():
                ranges[name].check(PREFIXES[source] + name, value)
            if source == REQUEST:
                self._limit_steps(algorithm, given, values)
            values |= given
            sources |= dict.fromkeys(given, source)
        follows = load is not None and sources.get("threshold") == SERVER
        try:
            settings = algorithm.config(**values)
            if load is not None and follows:
                replace(settings, threshold=load.busy)  # type: ignore[call-arg]
        except SettingsError as error:  # values that do not fit together
            raise SettingsError(_with_sources(str(error), sources)) from error
        sources["algorithm"] = DEFAULT if by_default else chooser
        caps = (
            (REQUEST, asked.get("max_steps")),
            (SERVER, self.max_steps),
            (self._source(MAX_STEPS_FIELD), self.checkpoint.get(MAX_STEPS_FIELD)),
            (DEFAULT, algorithm.cap(self.length, settings)),
        )
        sources["max_steps"], steps = next((source, int(cap)) for source, cap in caps if cap)
        base = next(int(cap) for _, cap in caps[1:] if cap)
        if self.corruption == "uniform":
            # The temperature schedule ends after `base` steps.
            steps = min(steps, base)
        return ResolvedDecoding(algorithm, settings, steps, base, blocks, sources, follows)

    def _limit_steps(
        self, algorithm: Algorithm, asked: Mapping[str, float], own: Mapping[str, float]
    ) -> None:
        """Refuse step counts with which a request would occupy its slot for too long.

        `own` has the settings that it would get otherwise, which it may always ask for.
        """
        for name, value in asked.items():
            blocks = algorithm.config.ranges()[name].blocks
            if blocks is None:
                continue
            default = own.get(name, algorithm.config().values()[name])
            limit = max(self.settings.request_step_limit or blocks * self.length, int(default))
            if value > limit:
                raise SettingsError(
                    f"{PREFIXES[REQUEST]}{name} must be at most {limit} on this server, whose "
                    f"blocks have {self.length} positions (dllm.request_step_limit sets another "
                    f"limit), got {shown(value)}"
                )

    def _open_blocks(self, algorithm: Algorithm, chooser: str, asked: Mapping[str, Any]) -> int:
        """`ResolvedDecoding.blocks` of a request; raises `SettingsError`."""
        most = self.settings.blocks
        blocks: int = asked.get("blocks", most)
        if blocks > most:
            raise SettingsError(
                f"{PREFIXES[REQUEST]}blocks must be at most {most} on this server (dllm.blocks), "
                f"got {shown(blocks)}"
            )
        if most > 1 and not algorithm.in_blocks:
            raise SettingsError(
                f"{PREFIXES[chooser]}algorithm: {algorithm.name} cannot decode several blocks of a "
                f"canvas at once, and this server has dllm.blocks={most}; choose another algorithm"
            )
        if most > 1 and asked.get("replay"):
            raise SettingsError(
                f"{PREFIXES[REQUEST]}replay: a replay counts the steps of single blocks, and this "
                f"server has dllm.blocks={most}; remove it"
            )
        return blocks


def _with_sources(sentence: str, sources: Mapping[str, str]) -> str:
    """Prefix each setting's name in the sentence according to where its value was given."""
    names = "|".join(map(re.escape, sources))

    def called(name: re.Match[str]) -> str:
        return PREFIXES.get(sources[name[0]], "") + name[0]

    return re.sub(rf"\b({names})\b", called, sentence)


@dataclass(frozen=True)
class ResolvedRequest:
    """The settings with which a request is decoded.

    Messages between vLLM's processes carry the fields, so all of them are plain values. Those that
    are not explained here are as in `ResolvedDecoding` and `DllmSettings`.

    Attributes:
        algorithm: the algorithm's registered name.
        settings: the algorithm's settings, by name.
        seed_canvas: token ids that the first canvas starts from, or None.
        pinned: positions of the seed canvas that keep their token.
        read_only: a single canvas is the whole answer and leaves without a commit.
        constrained: only the request's ``logprob_token_ids`` may be chosen.
        stream_prefix: output the decided beginning of an unfinished canvas.
        constraint_tokens: None if the request sets ``max_tokens``.
        step_details: what is wanted to know of the request's steps, a `StepDetails`.
    """

    algorithm: str
    settings: Mapping[str, float]
    max_steps: int
    schedule_steps: int
    blocks: int = 1
    seed_canvas: Sequence[int] | None = None
    pinned: Sequence[int] = ()
    read_only: bool = False
    constrained: bool = False
    stream_prefix: bool = False
    constraint_depth: int | None = None
    constraint_tokens: int | None = None
    step_details: int = StepDetails.NOTHING
    follows_load: bool = False

    @classmethod
    def of(
        cls, decoding: ResolvedDecoding, options: Mapping[str, Any] | None = None
    ) -> ResolvedRequest:
        """Combine how a request is decoded with its other options."""
        given = options or {}
        as_given = {name: given[name] for name in AS_GIVEN if name in given}
        flags: dict[str, Any] = {name: bool(given.get(name)) for name in FLAGS}
        return cls(
            algorithm=decoding.algorithm.name,
            settings=decoding.settings.values(),
            max_steps=decoding.max_steps,
            schedule_steps=decoding.schedule_steps,
            blocks=decoding.blocks,
            step_details=sum(flag for name, flag in TRACING_OPTIONS.items() if given.get(name)),
            follows_load=decoding.follows_load,
            **as_given,
            **flags,
        )

    @classmethod
    def received(cls, extra_args: Mapping[str, Any]) -> ResolvedRequest:
        """Read it from extra arguments in a worker, where a message may have made it a mapping."""
        value = extra_args[RESOLVED]
        return value if isinstance(value, cls) else cls(**value)

    def decoding(self, corruption: Corruption) -> ResolvedDecoding:
        """The algorithm and its settings as objects, for a worker; nothing is parsed."""
        algorithm, _ = get_algorithm(self.algorithm, corruption)
        settings = algorithm.config(**self.settings)
        steps = self.max_steps, self.schedule_steps
        return ResolvedDecoding(algorithm, settings, *steps, self.blocks)
