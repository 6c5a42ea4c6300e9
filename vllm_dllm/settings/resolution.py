"""Resolve settings: request options override server settings, which override the checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_dllm.decoding import Algorithm, Corruption, get_algorithm, registered_names
from vllm_dllm.ranges import AlgorithmConfig, SettingsError, shown
from vllm_dllm.settings.parsing import names_of, parse_request_options, parse_settings
from vllm_dllm.settings.request import RequestOptions
from vllm_dllm.settings.server import SEPARATE, STEPS, TWO_BLOCKS, DllmSettings

REQUEST, SERVER, CHECKPOINT, DEFAULT = "request", "server", "checkpoint", "default"
# The options for a generation config that replaces the checkpoint's, and for an override of either.
FOLDER, OVERRIDE = "--generation-config", "--override-generation-config"
HF_OVERRIDES = "--hf-overrides"
# Fields of a generation config: the cap on a canvas' steps, and DiffusionGemma's sampler.
MAX_STEPS_FIELD = "max_denoising_steps"
SAMPLER_FIELDS = ("t_min", "t_max", "stability_threshold", "confidence_threshold")
SAMPLER, BOUND = "sampler_config", "entropy_bound"
# The prefix with which an error message names a setting, by where the value came from.
PREFIXES = {
    REQUEST: "diffusion_",
    SERVER: "dllm.",
    CHECKPOINT: "generation_config.json: ",
    FOLDER: f"{FOLDER}: ",
    OVERRIDE: f"{OVERRIDE}: ",
}


def named_algorithm(
    name: str, corruption: Corruption, source: str
) -> tuple[Algorithm, dict[str, float]]:
    """The algorithm whose name was given in a request or for a server, and its preset's settings.

    Raises:
        SettingsError: see `get_algorithm`; the message also names the setting.
    """
    try:
        return get_algorithm(name, corruption)
    except SettingsError as error:
        raise SettingsError(f"{PREFIXES[source]}algorithm: {error}") from error


def of_others(algorithm: Algorithm, source: str) -> Mapping[str, str]:
    """See `unknown_names.settings_of_others`, which is imported for refusals only."""
    from vllm_dllm.settings.unknown_names import settings_of_others

    return settings_of_others(algorithm, PREFIXES[source])


def server_settings(
    additional_config: object, corruption: Corruption, own_algorithm: str
) -> DllmSettings:
    """Parse the settings of a server.

    Args:
        additional_config: the value of vLLM's option.
        corruption: see `Served`.
        own_algorithm: see `Served`.

    Raises:
        SettingsError: see `parse_settings`; or the algorithm is unknown. That is checked before its
            settings, which would be refused for a less useful reason.
    """
    algorithm, _ = get_algorithm(own_algorithm, corruption)

    def parameters_of(name: object) -> Collection[str]:
        nonlocal algorithm
        if isinstance(name, str) and name:
            algorithm, _ = named_algorithm(name, corruption, SERVER)
        return algorithm.config.ranges()

    return parse_settings(additional_config, parameters_of, lambda: of_others(algorithm, SERVER))


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
        return registered_names(self.corruption)

    @property
    def two_blocks(self) -> bool:
        """Whether a step over a canvas also reads the block before it."""
        return self.commits == TWO_BLOCKS

    @property
    def window_length(self) -> int:
        """The number of positions that a step over a canvas reads; vLLM's count of draft tokens."""
        return 2 * self.length if self.two_blocks else self.length

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
        if not isinstance(name, str) or not name or ":" in name:
            name = self.settings.algorithm or self.own_algorithm
        algorithm, _ = named_algorithm(name, self.corruption, REQUEST)
        ranges = algorithm.config.ranges()
        return parse_request_options(extra_args, ranges, lambda: of_others(algorithm, REQUEST))

    def option_names(self) -> set[str]:
        """The names of all request options, without prefix, including those of other models."""
        from vllm_dllm.settings.unknown_names import every_parameter

        return names_of(RequestOptions, every_parameter())

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
        chooser = REQUEST if asked.algorithm else SERVER
        name = asked.algorithm or self.settings.algorithm or self.own_algorithm
        algorithm, preset = named_algorithm(name, self.corruption, chooser)
        ranges, values = algorithm.config.ranges(), dict[str, float]()
        sources = dict.fromkeys(ranges, DEFAULT)
        layers = [(self._source(name), {name: value}) for name, value in self.checkpoint.items()]
        for source, layer in ((SERVER, self.settings.parameters), (REQUEST, asked.parameters)):
            layers += [(source, preset)] if source == chooser else []
            layers.append((source, dict(layer)))
        for source, layer in layers:
            given = {name: value for name, value in layer.items() if name in ranges}
            for name, value in given.items():
                ranges[name].check(PREFIXES[source] + name, value)
            if source == REQUEST:
                self._limit(algorithm, given, values)
            values |= given
            sources |= dict.fromkeys(given, source)
        try:
            settings = algorithm.config(**values)
        except SettingsError as error:  # values that do not fit together
            raise SettingsError(_with_sources(str(error), sources)) from error
        sources["algorithm"] = chooser if asked.algorithm or self.settings.algorithm else DEFAULT
        caps = (
            (REQUEST, asked.max_steps),
            (SERVER, self.max_steps),
            (self._source(MAX_STEPS_FIELD), self.checkpoint.get(MAX_STEPS_FIELD)),
            (DEFAULT, algorithm.cap(self.length, settings)),
        )
        sources["max_steps"], steps = next((source, int(cap)) for source, cap in caps if cap)
        base = next(int(cap) for _, cap in caps[1:] if cap)
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
