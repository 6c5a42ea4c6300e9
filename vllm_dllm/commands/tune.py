"""``vllm-dllm tune``: find the setting that answers a user's own prompts in the fewest passes.

One engine answers all prompts with many settings. What it has measured is kept in a file, so that
the same command goes on where it was interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import random
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm import __version__
from vllm_dllm.commands import installation, sweep
from vllm_dllm.commands.prompt_file import Row, conversation, read_prompts
from vllm_dllm.commands.show_config import reason
from vllm_dllm.commands.sweep import Part, Setting
from vllm_dllm.ranges import shown
from vllm_dllm.settings.server import SETTINGS_KEY

if TYPE_CHECKING:
    from vllm import LLM

PASSES = "vllm:diffusion_num_denoising_steps"  # vLLM's counter of passes over canvases
# What the measurements do not depend on, so that the same file serves another race. The prompts
# themselves are compared.
OF_THE_RACE = frozenset({"data", "tolerance", "algorithms", "output"})


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
        settings = sweep.settings_of(served, args.algorithms)
        args.output.mkdir(parents=True, exist_ok=True)
        log, tolerance = args.output / "measurements.jsonl", args.tolerance / 100
        data = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        take_up(log, {"version": __version__, "data": data, **args.measured}, settings)
        race(Bench(llm, args, rows), settings, tolerance, log)
    finally:
        llm.llm_engine.engine_core.shutdown()
    best = sweep.winner(settings, tolerance)
    sweep.print_table(settings, best, tolerance)
    section = (args.additional_config or {}).get(SETTINGS_KEY) or {}
    (file := args.output / "winner.yaml").write_text(sweep.as_yaml(best, section))
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

    ends = sweep.part_ends(len(bench.rows))
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        log.open("a", encoding="utf-8") as file,
    ):
        bar = progress.add_task("")
        bench.answer(settings[0], 0, ends[0])  # warm up
        while racing := sweep.still_racing(settings, len(ends), tolerance):
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
            pairs = zip(ids, compared or theirs[begin:end], strict=True)
            scores = [agreement(ours, others) for ours, others in pairs]
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


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The share of tokens that two answers have in common, in the same order."""
    return difflib.SequenceMatcher(None, ours, theirs, autojunk=False).ratio()


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
