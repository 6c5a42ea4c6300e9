"""The race of ``vllm-dllm tune``: which settings take part, which of them goes on, and who wins.

All settings answer the same problems, by parts of growing size. The first one, the careful setting,
answers all parts. Another one leaves the race when it is clearly worse than that, or slower than
one that is known to be good enough. The report is a table and a configuration file.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.server import NAMES, SETTINGS_KEY

if TYPE_CHECKING:
    from vllm_dllm.settings.resolution import ResolvedDecoding, Served

# The values that are tried of settings that trade passes for quality, and the shares of the block
# that are tried as steps. Other settings keep the values they have; so does the cap on steps,
# because a temperature schedule is spread over a server's cap, and not over a request's.
TRIED: Mapping[str, Sequence[float]] = {
    "threshold": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    "entropy_bound": (0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
    "confidence_threshold": (0.005, 0.05, 0.5),
}
SHARES = (1, 2, 4, 8)
# So many times the tokens per pass are clearly faster on the problems that two settings share; on
# the other problems it may be a little different.
CLEARLY = 1.05
# Differences of scores are sums of rounded numbers.
ROUNDING = 1e-9
COLUMNS = ("problems", "score, %", "95 %", "to careful", "95 %", "tokens/pass", "tokens/s")


@dataclass(frozen=True)
class Part:
    """The scores and costs of a setting's answers to a part of the problems."""

    scores: list[float]  # a number between 0 and 1 for each problem
    tokens: int  # of all answers
    passes: int  # over their canvases, commits included
    seconds: float  # until all were answered together
    answers: list[list[int]] | None = None  # their token ids, if others are compared with them


@dataclass
class Setting:
    """A way to decode, and what is known of it."""

    name: str  # what the table calls it
    options: Mapping[str, Any]  # of requests, without their prefix
    choice: ResolvedDecoding  # the algorithm and all its settings
    parts: list[Part] = field(default_factory=list)  # in the order of the problems
    refusal: str = ""  # why the engine refuses such requests; empty if it does not

    @property
    def scores(self) -> list[float]:
        """The scores of the problems that it has answered."""
        return [score for part in self.parts for score in part.scores]

    @property
    def score(self) -> float:
        """The mean of its scores."""
        return statistics.fmean(self.scores)

    def tokens_per_pass(self, parts: int | None = None) -> float:
        """Tokens per pass over a canvas in its first `parts` parts, or in all; 0 without any."""
        done = self.parts[:parts]
        return sum(part.tokens for part in done) / max(1, sum(part.passes for part in done))

    def tokens_per_second(self) -> float:
        """Tokens per second of all its answers, as many at a time as the engine takes."""
        return sum(part.tokens for part in self.parts) / sum(part.seconds for part in self.parts)


def part_ends(problems: int) -> list[int]:
    """Return the ends of the parts: after an eighth, a quarter, a half and all of the problems."""
    return sorted({max(1, problems // share) for share in (8, 4, 2, 1)})


def interval(values: Sequence[float], *added: float) -> tuple[float, float]:
    """The 95 % interval of a mean: the normal one, with some more values at the ends of the range.

    Without these, equal values would have an interval of no width. Two values at each end are
    Agresti's and Coull's interval of a rate (The American Statistician 52, 1998), and one at each
    end is Bonett's and Price's of a paired difference (J. Educ. Behav. Stat. 37, 2012).
    """
    every = [*values, *added]
    mean, half = statistics.fmean(every), 1.96 * statistics.pstdev(every) / math.sqrt(len(every))
    return max(mean - half, min(added)), min(mean + half, max(added))


def against(setting: Setting, careful: Setting) -> tuple[float, float, float]:
    """Return a setting's lead over the careful one on its own problems, and the interval."""
    pairs = zip(setting.scores, careful.scores, strict=False)
    differences = [ours - theirs for ours, theirs in pairs]
    return statistics.fmean(differences), *interval(differences, -1, 1)


def hopeless(setting: Setting, careful: Setting, tolerance: float) -> bool:
    """Whether even the upper bound of its score is too far below the careful setting's."""
    return against(setting, careful)[2] < -tolerance


def winner(settings: Sequence[Setting], tolerance: float) -> Setting:
    """The one with the most tokens per pass of those that have answered all and are good enough.

    Among equally fast ones it is the better one, so that no other is both faster and better.
    """
    careful = settings[0]
    complete = (each for each in settings if len(each.parts) == len(careful.parts))
    return max(
        (each for each in complete if against(each, careful)[0] >= -tolerance - ROUNDING),
        key=lambda each: (each.tokens_per_pass(), each.score),
    )


def still_racing(settings: Sequence[Setting], parts: int, tolerance: float) -> list[Setting]:
    """The settings that have any of `parts` parts left to answer and may win; the first is next.

    After a first part of all, the fastest is next: once it is good enough, slower ones cannot win.
    """
    careful = settings[0]
    left = [each for each in settings if len(each.parts) < parts and not each.refusal]
    if careful in left:
        return left
    leader = winner(settings, tolerance)

    def may_win(one: Setting) -> bool:
        shared = leader.tokens_per_pass(len(one.parts))
        is_slower = shared > CLEARLY * one.tokens_per_pass()
        return not (is_slower or hopeless(one, careful, tolerance))

    left = [each for each in left if not each.parts or may_win(each)]
    return sorted(left, key=lambda each: (len(each.parts) > 0, -each.tokens_per_pass()))


def settings_of(served: Served, algorithms: Sequence[str] = ()) -> list[Setting]:
    """All settings that take part: the careful one, the server's own, and a grid per algorithm.

    Carefully, a masked model decides one position in each pass, the most probable one. For a model
    of uniform noise, the careful setting is the server's own. A model that edits has its own rule
    as the careful one, and no rule takes part that would write the ids of edits into texts. Grids
    are tried of these algorithms, or of all.

    Raises:
        SettingsError: the model has no such algorithm, or it is not for this model.
    """
    asked: list[dict[str, Any]] = [{}]
    edits = served.edit_tokens is not None
    if edits:
        asked.insert(0, {"algorithm": served.own_algorithm})
    elif served.corruption == "mask":
        asked.insert(0, {"algorithm": "LowConfidence", "threshold": 1.0})
    for name in algorithms or served.algorithm_names:
        try:
            plain = served.choose({"algorithm": name})
            if edits and not plain.algorithm.moves:
                raise SettingsError(f"{name} would write the ids of edits into texts")
        except SettingsError:
            if algorithms:
                raise
            continue  # it is for other models
        asked += ({"algorithm": name, **values} for values in _grid(served, plain))
        presets = (f"{name}-{preset}" for preset in plain.algorithm.presets)
        asked += ({"algorithm": each} for each in (name, *presets))
    found: dict[tuple[Any, ...], Setting] = {}
    for options in asked:
        choice = served.choose(options)
        if edits and not choice.algorithm.moves:  # the server's own
            continue
        values = [f"{name}={value:g}" for name, value in options.items() if name != "algorithm"]
        name = " ".join([options.get("algorithm", "default"), *values])
        key = choice.algorithm.name, choice.settings, choice.max_steps
        found.setdefault(key, Setting(name, options, choice))
    return list(found.values())


def _grid(served: Served, plain: ResolvedDecoding) -> Iterator[dict[str, float]]:
    """All combinations of the values that are tried of an algorithm's settings."""
    names = plain.algorithm.config.ranges()
    tried = {name: values for name, values in TRIED.items() if name in names}
    if "steps" in names:
        tried["steps"] = sorted({max(1, served.length // share) for share in SHARES})
    for values in itertools.product(*tried.values()):
        yield dict(zip(tried, values, strict=True))


def print_table(settings: Sequence[Setting], best: Setting, tolerance: float) -> None:
    """Print a line for each setting, the most tokens per pass first."""
    from rich.console import Console
    from rich.table import Table

    table, careful = Table("setting", box=None, pad_edge=False), settings[0]
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for each in sorted(settings, key=lambda each: -each.tokens_per_pass()):
        if each.refusal:
            table.add_row(each.name, *[""] * len(COLUMNS), f"refused: {each.refusal}")
            continue
        low, high = (100 * bound for bound in interval(each.scores, 0, 0, 1, 1))
        mean, least, most = (100 * bound for bound in against(each, careful))
        note = "" if len(each.parts) == len(careful.parts) else "slower"
        if hopeless(each, careful, tolerance):
            note = "worse"
        notes = {id(careful): "careful", id(best): "winner"}
        table.add_row(
            each.name,
            *(str(len(each.scores)), f"{100 * each.score:.1f}", f"{low:.1f} to {high:.1f}"),
            *(f"{mean:+.1f}", f"{least:+.1f} to {most:+.1f}"),
            *(f"{each.tokens_per_pass():.2f}", f"{each.tokens_per_second():.0f}"),
            notes.get(id(each), note),
        )
    console = Console()
    # A file has no width, and its lines must not be folded.
    (console if console.is_terminal else Console(width=200)).print(table)


def as_yaml(best: Setting, section: Mapping[str, Any]) -> str:
    """The winner for vLLM's ``--config``, with the engine's settings that are no algorithm's."""
    import yaml

    kept = {name: value for name, value in section.items() if name in NAMES}
    chosen = {"algorithm": best.choice.algorithm.name, **best.choice.settings.values()}
    return yaml.safe_dump({"additional-config": {SETTINGS_KEY: kept | chosen}}, sort_keys=False)
