"""Resolve settings: request options override server settings, which override the checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_dllm.decoding import MODELS, Algorithm, Corruption, algorithms, get_algorithm, other_kind
from vllm_dllm.ranges import AlgorithmConfig, SettingsError, listed, shown
from vllm_dllm.settings.generation_config import MAX_STEPS_FIELD
from vllm_dllm.settings.parsing import parse_request_options, request_names
from vllm_dllm.settings.request import RequestOptions
from vllm_dllm.settings.server import STEPS, DllmSettings

REQUEST, SERVER, CHECKPOINT, DEFAULT = "request", "server", "checkpoint", "default"
# The options for a generation config that replaces the checkpoint's, and for an override of either.
FOLDER, OVERRIDE = "--generation-config", "--override-generation-config"
HF_OVERRIDES = "--hf-overrides"
# The server's settings other than the algorithm's, in the order that `explained` lists them.
SHOWN = (
    *("execution", "eos_early_stop", "skip_last_commit", "fused_commit"),
    *("window", "kernels", "request_step_limit", "constraint_depth", "constraint_tokens"),
)
# The prefix with which an error message names a setting, by where the value came from.
PREFIXES = {
    REQUEST: "diffusion_",
    SERVER: "dllm.",
    CHECKPOINT: "generation_config.json: ",
    FOLDER: f"{FOLDER}: ",
    OVERRIDE: f"{OVERRIDE}: ",
}


def parameter_names(corruption: Corruption) -> set[str]:
    """The names of the settings of all algorithms for a kind of model."""
    return {name for algorithm in algorithms(corruption) for name in algorithm.config.ranges()}


def foreign_settings(algorithm: Algorithm, source: str) -> dict[str, str]:
    """The settings that only algorithms for the other kind of model have.

    Args:
        algorithm: the algorithm in force, whose settings the sentences name.
        source: where the settings are given, `REQUEST`, `SERVER` or `OVERRIDE`.

    Returns:
        The settings' names without a prefix, each with the sentence that refuses it.
    """
    other, prefix = other_kind(algorithm.corruption), PREFIXES[source]
    names = parameter_names(other) - parameter_names(algorithm.corruption)
    return {
        name: f"{_not_of(algorithm, prefix, name)}; remove it, because it belongs to "
        f"{listed(owners(name, other))}, for {MODELS[other]}"
        for name in names
    }


def _not_of(algorithm: Algorithm, prefix: str, name: str) -> str:
    own = ", ".join(prefix + known for known in sorted(algorithm.config.ranges())) or "none"
    return f"{prefix}{name} is not a setting of {algorithm.name}, which has {own}"


def owners(name: str, corruption: Corruption) -> list[str]:
    """The algorithms for a kind of model that have a setting of this name."""
    return [a.name for a in algorithms(corruption) if name in a.config.ranges()]


def check_algorithm(name: str, corruption: Corruption, source: str) -> Algorithm:
    """The algorithm whose name was given in a request or for a server.

    Raises:
        SettingsError: see `get_algorithm`; the message also names the setting.
    """
    try:
        return get_algorithm(name, corruption)[0]
    except SettingsError as error:
        raise SettingsError(f"{PREFIXES[source]}algorithm: {error}") from error


@dataclass(frozen=True)
class Choice:
    """How the canvases of a request are decoded.

    Attributes:
        algorithm: the decoding algorithm.
        settings: the algorithm's settings.
        max_steps: cap on the denoise steps of a canvas.
        schedule_steps: number of steps that a temperature schedule is spread over.
        sources: where each setting, ``algorithm`` and ``max_steps`` come from, by name.
    """

    algorithm: Algorithm
    settings: AlgorithmConfig
    max_steps: int
    schedule_steps: int
    sources: Mapping[str, str]

    @property
    def is_ours(self) -> bool:
        """Whether this package provides the algorithm, and so knows more than its methods."""
        return type(self.algorithm).__module__.startswith("vllm_dllm.")


@dataclass(frozen=True)
class Served:
    """The decoding settings of a served model, known to the front end and to the workers.

    Attributes:
        corruption: what fills fresh canvases, masks or uniform noise.
        own_algorithm: the decoding algorithm that the model's authors use.
        settings: the server's settings.
        checkpoint: settings and ``max_denoising_steps`` of the generation config, by name.
        elsewhere: by name, the source (`FOLDER` or `OVERRIDE`) of those that are not from the
            checkpoint itself.
        length: L, the canvas length.
        max_steps: the server's cap on the denoise steps of a canvas, or None.
        mask_token: the token that fills a fresh canvas; None for uniform noise.
        two_blocks: whether a step over a canvas also reads the block before it, see
            `engine.block_and_canvas`.
    """

    corruption: Corruption
    own_algorithm: str
    settings: DllmSettings
    checkpoint: Mapping[str, float] = field(default_factory=dict)
    length: int = 32
    max_steps: int | None = None
    mask_token: int | None = None
    two_blocks: bool = False
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if MAX_STEPS_FIELD in self.checkpoint:
            prefix = PREFIXES[self._source(MAX_STEPS_FIELD)]
            STEPS.check(prefix + MAX_STEPS_FIELD, self.checkpoint[MAX_STEPS_FIELD])

    def _source(self, name: str) -> str:
        """Where a setting of the generation config comes from."""
        return self.elsewhere.get(name, CHECKPOINT)

    @property
    def algorithm_names(self) -> list[str]:
        """The registered algorithms that requests may choose; presets are not listed separately."""
        return [algorithm.name for algorithm in algorithms(self.corruption)]

    @property
    def window_length(self) -> int:
        """The number of positions that a step over a canvas reads; vLLM's count of draft tokens."""
        return 2 * self.length if self.two_blocks else self.length

    def explained(self, length_source: str) -> list[tuple[str, str, str]]:
        """The settings of a request without options, as (name, value, source).

        `length_source` is where the canvas length comes from.
        """
        choice, settings = self.choose(), self.settings
        lines = [("algorithm", choice.algorithm.name, choice.sources["algorithm"])]
        lines += [
            (name, f"{value:g}", choice.sources[name])
            for name, value in choice.settings.values().items()
        ]
        lines += [
            ("max_steps", str(choice.max_steps), choice.sources["max_steps"]),
            ("canvas_length", str(self.length), length_source),
        ]
        for name in SHOWN:
            value, given = getattr(settings, name), name in settings.given
            shown = DEFAULT if value is None else str(value)
            lines.append((name, shown, SERVER if given else DEFAULT))
        return lines

    def constraint_depth(self, options: RequestOptions) -> int | None:
        """The depth to which a request's constraint is followed; None for the usual depth."""
        own = options.constraint_depth
        return self.settings.constraint_depth if own is None else own

    def constraint_tokens(self, options: RequestOptions) -> int:
        """The most tokens of a constrained output whose request sets no ``max_tokens``."""
        own = options.constraint_tokens
        return self.settings.constraint_tokens if own is None else own

    def options(self, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """Parse a request's options; raises `SettingsError` for an unknown or malformed one.

        An algorithm that does not fit the model is reported first: such a request's options belong
        to that algorithm, and would otherwise be refused for a less helpful reason.
        """
        name = (extra_args or {}).get(f"{PREFIXES[REQUEST]}algorithm")
        if isinstance(name, str) and name and ":" not in name:
            check_algorithm(name, self.corruption, REQUEST)
        else:
            name = self.settings.algorithm or self.own_algorithm

        def foreign() -> dict[str, str]:
            return foreign_settings(get_algorithm(name, self.corruption)[0], REQUEST)

        return parse_request_options(extra_args, parameter_names(self.corruption), foreign)

    def option_names(self) -> set[str]:
        """The names of all request options, without prefix, including those of other models."""
        every = parameter_names(self.corruption) | parameter_names(other_kind(self.corruption))
        return request_names(every)

    def _limit(
        self, algorithm: Algorithm, asked: Mapping[str, float], own: Mapping[str, float]
    ) -> None:
        """Refuse step counts with which a request would occupy its slot for too long.

        Args:
            algorithm: the request's algorithm.
            asked: the settings that the request asks for.
            own: the settings that it would get otherwise, which it may always ask for.

        Raises:
            SettingsError: a count exceeds its limit; the message names the setting, the limit, and
                how to raise it.
        """
        for name, allowed in algorithm.config.ranges().items():
            if name not in asked or allowed.blocks is None:
                continue
            default = algorithm.config().values()[name]
            limit = self.settings.request_step_limit or allowed.blocks * self.length
            limit = max(limit, int(own.get(name, default)))
            if asked[name] > limit:
                raise SettingsError(
                    f"{PREFIXES[REQUEST]}{name} must be at most {limit} on this server, whose "
                    f"blocks have {self.length} positions (dllm.request_step_limit sets another "
                    f"limit), got {shown(asked[name])}"
                )

    def choose(self, options: RequestOptions | None = None) -> Choice:
        """Resolve the settings of a request with these options.

        The order of precedence is request, server, generation config, the algorithm's default. A
        preset's values count as given at the place that names the preset, but explicit values at
        the same place override them.

        Raises:
            SettingsError: the algorithm is unknown, a setting belongs to another algorithm, or a
                value is out of range.
        """
        asked = options or RequestOptions()
        name = asked.algorithm or self.settings.algorithm or self.own_algorithm
        check_algorithm(name, self.corruption, REQUEST if asked.algorithm else SERVER)
        algorithm, preset = get_algorithm(name, self.corruption)
        values: dict[str, float] = {}
        sources = dict.fromkeys(algorithm.config.ranges(), DEFAULT)
        by_request = asked.algorithm is not None
        own = asked.algorithm is None
        layers = (
            *((self._source(name), {name: v}, False) for name, v in self.checkpoint.items()),
            (SERVER, {} if by_request else preset, False),
            (SERVER, self.settings.parameters, own),
            (REQUEST, preset if by_request else {}, False),
            (REQUEST, asked.parameters, True),
        )
        for source, layer, strict in layers:
            given = _checked(algorithm, source, layer, strict)
            if source == REQUEST:
                self._limit(algorithm, given, values)
            values |= given
            sources |= dict.fromkeys(given, source)
        try:
            settings = algorithm.config(**values)
        except SettingsError as error:  # values that do not fit together
            raise SettingsError(_with_sources(str(error), sources)) from error
        base = self.max_steps or int(self.checkpoint.get(MAX_STEPS_FIELD, 0))
        sources["algorithm"] = (
            REQUEST if by_request else SERVER if self.settings.algorithm else DEFAULT
        )
        sources["max_steps"] = (
            REQUEST
            if asked.max_steps
            else SERVER
            if self.max_steps
            else self._source(MAX_STEPS_FIELD)
            if base
            else DEFAULT
        )
        base = base or algorithm.cap(self.length, settings)
        steps = asked.max_steps or base
        if self.corruption == "uniform":
            # The temperature schedule ends after `base` steps.
            steps = min(steps, base)
        return Choice(algorithm, settings, steps, base, sources)


def _with_sources(sentence: str, sources: Mapping[str, str]) -> str:
    """Prefix each setting's name in the sentence according to where its value was given."""
    names = "|".join(map(re.escape, sources))

    def called(name: re.Match[str]) -> str:
        return PREFIXES.get(sources[name[0]], "") + name[0]

    return re.sub(rf"\b({names})\b", called, sentence)


def _checked(
    algorithm: Algorithm, source: str, values: Mapping[str, float], strict: bool
) -> dict[str, float]:
    """Check and return the values that this algorithm has as settings; `strict` refuses others."""
    ranges = algorithm.config.ranges()
    prefix = PREFIXES[source]
    for name, value in values.items():
        if name in ranges:
            ranges[name].check(prefix + name, value)
        elif strict:
            raise SettingsError(
                f"{_not_of(algorithm, prefix, name)}; remove it, or set {prefix}algorithm to "
                f"{listed(owners(name, algorithm.corruption), 'or')}"
            )
    return {name: value for name, value in values.items() if name in ranges}
