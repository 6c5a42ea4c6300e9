"""``vllm-dllm tune``: find the setting that answers a user's own prompts in the fewest passes.

One engine answers the same problems with many settings, by parts of growing size. The first one,
the careful setting, answers all parts. Another one leaves the race when it is clearly worse than
that, or slower than one that is known to be good enough. The report is a table and a configuration
file. What has been measured is kept in a file, so that the same command goes on where it was
interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import math
import random
import shlex
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm import __version__
from vllm_dllm.commands import installation
from vllm_dllm.commands.prompt_file import Row, conversation, read_prompts
from vllm_dllm.commands.show_config import reason
from vllm_dllm.ranges import SettingsError, shown
from vllm_dllm.settings.server import NAMES, SETTINGS_KEY

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_dllm.settings.resolution import ResolvedDecoding, Served

PASSES = "vllm:diffusion_num_denoising_steps"  # vLLM's counter of passes over canvases
# What the measurements do not depend on, so that the same file serves another race. The prompts
# themselves are compared.
OF_THE_RACE = frozenset({"data", "tolerance", "algorithms", "output"})
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


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status, which is 130 if the sweep is interrupted."""
    try:
        installation.load("WARNING")
        args = parse(arguments)
        rows = read_rows(args.data)
        tune(args, rows)
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"tune: {reason(error)}", file=sys.stderr)
        return 1


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the command's own options and those of vLLM's engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm-dllm tune", description=__doc__)
    add = EngineArgs.add_cli_args(parser).add_argument_group("tune").add_argument
    add("model_tag", metavar="MODEL")
    data = "a prompt (or messages) in each line, and an answer if it is known"
    add("--data", type=Path, required=True, metavar="FILE.jsonl", help=data)
    command = (
        "reads the lines of the data with an output each, and prints a number from 0 to 1 for each;"
        " without it, outputs must equal the answers, or are compared with the careful setting's"
    )
    add("--score-command", metavar="COMMAND", help=command)
    tolerance = "how many points of 100 the winner may score less than the careful setting"
    add("--tolerance", type=float, default=1.0, help=tolerance)
    add("--max-tokens", type=int, default=256, help="the most tokens of an answer")
    add("--algorithms", nargs="+", default=[], metavar="NAME", help="default: all")
    add("--output", type=Path, default=Path("tune"), metavar="FOLDER")
    args = parser.parse_args(list(arguments))
    if not 0 <= args.tolerance <= 100:
        parser.error(f"--tolerance must be from 0 to 100, got {args.tolerance}")
    if args.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, got {args.max_tokens}")
    changed = {name: it for name, it in vars(args).items() if it != parser.get_default(name)}
    args.measured = {name: str(it) for name, it in changed.items() if name not in OF_THE_RACE}
    args.model = args.model_tag
    return args


def read_rows(path: Path) -> list[Row]:
    """The lines of a data file, shuffled, so that every part is like the whole.

    Raises ValueError if a line cannot be used, only some have an answer, or there is none.
    """
    rows = read_prompts(path, "output")
    answers = sum("answer" in row for row in rows)
    if not rows or answers not in (0, len(rows)):
        raise ValueError(f"{path}: {answers} of {len(rows)} prompts have an answer")
    random.Random(0).shuffle(rows)
    return rows


def tune(args: Namespace, rows: Sequence[Row]) -> None:
    """Run the race, or go on with it, and write what it has found."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    engine_args = EngineArgs.from_cli_args(args)
    engine_args.disable_log_stats = False
    llm = LLM.from_engine_args(engine_args)
    try:
        served = getattr(llm.model_config, "dllm", None)
        if served is None:
            raise ValueError(f"{args.model} is not a model of this package")
        if served.settings.threshold_under_load is not None:
            raise ValueError("a sweep needs thresholds that stay; remove threshold_under_load")
        settings = settings_of(served, args.algorithms)
        args.output.mkdir(parents=True, exist_ok=True)
        log, tolerance = args.output / "measurements.jsonl", args.tolerance / 100
        data = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        take_up(log, {"version": __version__, "data": data, **args.measured}, settings)
        race(Bench(llm, args, rows), settings, tolerance, log)
    finally:
        llm.llm_engine.engine_core.shutdown()
    best = winner(settings, tolerance)
    print_table(settings, best, tolerance)
    section = (args.additional_config or {}).get(SETTINGS_KEY) or {}
    (file := args.output / "winner.yaml").write_text(as_yaml(best, section))
    print(f"\nwinner: {best.name}\nvllm serve {args.model} --config {file}")


def take_up(log: Path, header: Row, settings: Sequence[Setting]) -> None:
    """Give settings what an earlier run has measured, without a line cut off, or begin a file.

    Raises ValueError, which says what differs, for a file of other prompts or another engine.
    """
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    first, *lines = map(
        json.loads, text[: text.rfind("\n") + 1].splitlines() or [json.dumps(header)]
    )
    for name in sorted(header.keys() | first.keys()):
        before, now = (shown(each.get(name)) for each in (first, header))
        if before != now:
            raise ValueError(f"{log} is of {name} {before}, not {now}; choose another --output")
    by_options = {json.dumps(each.options): each for each in settings}
    for line in lines:
        setting = by_options.get(json.dumps(line["setting"]))
        if setting is not None:
            setting.refusal = line["refusal"]
            setting.parts += [Part(**part) for part in line["parts"]]
    wanted = "".join(json.dumps(line) + "\n" for line in (first, *lines))
    if text != wanted:
        log.write_text(wanted, encoding="utf-8")


def race(bench: Bench, settings: Sequence[Setting], tolerance: float, log: Path) -> None:
    """Let settings answer part after part until the winner is known; appends each to the file."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
    from vllm.exceptions import VLLMClientError

    ends = part_ends(len(bench.rows))
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        log.open("a", encoding="utf-8") as file,
    ):
        bar = progress.add_task("")
        bench.answer(settings[0], 0, ends[0])  # warm up
        while racing := still_racing(settings, len(ends), tolerance):
            one, *_ = racing
            done = sum(len(each.scores) for each in settings)
            total = done + sum(ends[-1] - len(each.scores) for each in racing)
            progress.update(bar, description=one.name, completed=done, total=total)
            try:
                part = bench.measure(one, settings[0], ends[len(one.parts)])
                one.parts.append(part)
                parts = [asdict(part)]
            except VLLMClientError as error:  # such as a rule that needs temperature 0
                if one is settings[0]:
                    raise
                one.refusal, parts = str(error), []
            line = {"setting": one.options, "refusal": one.refusal, "parts": parts}
            print(json.dumps(line), file=file, flush=True)


class Bench:
    """Answers problems in one engine, with any setting, and scores the answers."""

    def __init__(self, llm: LLM, args: Namespace, rows: Sequence[Row]) -> None:
        self.llm = llm
        self.rows = rows
        self.max_tokens = args.max_tokens
        self.command = shlex.split(args.score_command or "")

    def measure(self, setting: Setting, careful: Setting, end: int) -> Part:
        """Answer the problems from the setting's next one to the one before `end`.

        Raises VLLMClientError if the engine refuses the setting.
        """
        begin = len(setting.scores)
        self.llm.reset_prefix_cache()  # or only the first setting would compute the prompts
        passes, started = self.passes(), time.monotonic()
        outputs = self.answer(setting, begin, end)
        seconds = time.monotonic() - started
        ids = [list(output.token_ids) for output in outputs]
        rows, texts, compared = self.rows[begin:end], [output.text for output in outputs], None
        if self.command:
            scores = scores_of(self.command, rows, texts)
        elif "answer" in rows[0]:
            answers = [str(row["answer"]) for row in rows]
            scores = [float(a.strip() == b.strip()) for a, b in zip(texts, answers, strict=True)]
        else:
            compared = ids if setting is careful else None
            theirs = [answer for part in careful.parts for answer in part.answers or ()]
            # The share of tokens that two answers have in common, in the same order.
            pairs = zip(ids, compared or theirs[begin:end], strict=True)
            matchers = (difflib.SequenceMatcher(None, *pair, autojunk=False) for pair in pairs)
            scores = [matcher.ratio() for matcher in matchers]
        passes = round(self.passes() - passes)
        return Part(scores, sum(map(len, ids)), passes, seconds, compared)

    def answer(self, setting: Setting, begin: int, end: int) -> list[Any]:
        """The completions of problems `begin` to `end`; a problem's seed is its number."""
        asked, chats = [], []
        for number, row in enumerate(self.rows[begin:end], begin):
            params = self.llm.get_default_sampling_params()
            params.max_tokens, params.seed = self.max_tokens, number
            params.extra_args = {f"diffusion_{name}": it for name, it in setting.options.items()}
            asked.append(params)
            chats.append(conversation(row))
        return [output.outputs[0] for output in self.llm.chat(chats, asked, use_tqdm=False)]

    def passes(self) -> float:
        """The number of passes over canvases so far."""
        return sum(each.value for each in self.llm.get_metrics() if each.name == PASSES)


def scores_of(command: Sequence[str], rows: Sequence[Row], texts: Sequence[str]) -> list[float]:
    """The scores that a command prints for outputs, which it reads as lines of JSON."""
    pairs = zip(rows, texts, strict=True)
    lines = "".join(json.dumps({**row, "output": text}) + "\n" for row, text in pairs)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"--score-command ended with {done.returncode}: {done.stderr[-500:]}")
    numbers: list[float] = []
    with contextlib.suppress(ValueError):
        numbers = [float(word) for word in done.stdout.split()]
    if len(numbers) != len(rows) or not all(0 <= number <= 1 for number in numbers):
        raise RuntimeError(
            f"--score-command printed {shown(done.stdout)} for {len(rows)} outputs, and not a "
            "number from 0 to 1 for each"
        )
    return numbers


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
    are tried of these algorithms, or of all; raises `SettingsError` if one is not for this model.
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
