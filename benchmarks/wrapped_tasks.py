"""Does a constraint on the form of an answer cost right answers, or forward passes?

    .venv/bin/python benchmarks/wrapped_tasks.py [MODEL...] [--json PATH] [--per-task 100]
    .venv/bin/python benchmarks/wrapped_tasks.py MODEL... --form json

The same held-out problems of the seven tasks are answered with and without a constraint, greedily
and at temperature 1. LLaDA2 decides at threshold 0.9; DiffusionGemma decodes as published. The
constraint is the language of a task's answers:

- `--form plain`, for the published checkpoints, which know no other answers: the schema
  `{"type": "integer"}`, a regular expression for numbers between spaces, and for `copy` a choice
  of the answers to all problems;
- `--form json`, for checkpoints that `examples/tiny/learn_json.py` has taught to answer "json ..."
  with `{"answer": ...}`: the schema of that object, with an integer, an array of integers or an
  enum. "unasked" is this constraint where the prompt does not ask for JSON.

Both forms can be given. For every task the benchmark gives exact matches with their 95 % interval,
and forward passes over a canvas (a count that does not depend on the machine, commits included).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy import Run, Setting, is_aligned, offline, summary  # noqa: E402
from benchmarks.accuracy_tables import constrained_over_free  # noqa: E402
from benchmarks.common import quiet_engines, write  # noqa: E402

quiet_engines()  # before torch and vLLM are imported

from examples.tiny.tasks import LISTS, TASKS, Problem, as_json, held_out_set  # noqa: E402
from tests.support.checkpoints import TINY_GEMMA, TINY_LLADA2  # noqa: E402

TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0}
INTEGER = {"type": "integer"}
# A list of three-digit numbers in JSON takes more than accuracy.py's 64 tokens.
MAX_TOKENS = 80

Constrain = Callable[[str, Sequence[Problem]], dict[str, Any]]


def plain(task: str, problems: Sequence[Problem]) -> dict[str, Any]:
    """The language of a task's answers as they are; options of `StructuredOutputsParams`."""
    if task in LISTS:
        return {"regex": "[0-9]{1,3}( [0-9]{1,3})*"}
    if task == "copy":
        return {"choice": [problem.answer for problem in problems]}
    return {"json": INTEGER}


def wrapped(task: str, problems: Sequence[Problem]) -> dict[str, Any]:
    """The schema of a task's answers in an object; `problems` as they are without JSON."""
    answer: dict[str, Any] = INTEGER
    if task in LISTS:
        answer = {"type": "array", "items": INTEGER}
    elif task == "copy":
        answer = {"enum": [problem.answer for problem in problems]}
    whole = {"properties": {"answer": answer}, "required": ["answer"]}
    return {"json": {"type": "object", **whole, "additionalProperties": False}}


# Form -> way -> whether the prompt asks for JSON, and the constraint.
FORMS: dict[str, dict[str, tuple[bool, Constrain | None]]] = {
    "plain": {"free": (False, None), "constrained": (False, plain)},
    "json": {"free": (True, None), "constrained": (True, wrapped), "unasked": (False, wrapped)},
}


def read(text: str) -> str:
    """The answer in a text, as the tasks write it; a text that is no such object is itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, dict) or list(value) != ["answer"]:
        return text
    (value,) = value.values()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def measure(model: str, forms: Sequence[str], per_task: int, seed: int) -> dict[str, Any]:
    """Right answers and passes of each task, by form, temperature and way."""
    problems, aligned = held_out_set(per_task, seed), is_aligned(model)
    request = {"diffusion_threshold": 0.9} if aligned else {}
    results: dict[str, Any] = {}
    with offline(model, {}, 16, "float32") as answer:
        for form in forms:
            for name, temperature in TEMPERATURES.items():
                sampling = {"temperature": temperature, "max_tokens": MAX_TOKENS}
                setting = Setting(name, {}, request, sampling)
                found = results.setdefault(form, {}).setdefault(name, {})
                for way, (asks, constrain) in FORMS[form].items():
                    found[way] = {}
                    for task in TASKS:
                        mine = [problem for problem in problems if problem.task == task]
                        own = options(task, mine, constrain)
                        given = [as_json(problem) for problem in mine] if asks else mine
                        run = answer(given, setting, own)
                        found[way][task] = figures(run, mine, aligned)
                    show(f"{Path(model).name}, {form}, {name}, {way}", found[way])
    return results


def options(
    task: str, problems: Sequence[Problem], constrain: Constrain | None
) -> list[dict[str, Any]]:
    """Sampling parameters of each problem: a seed of its own, and the task's constraint."""
    from vllm.sampling_params import StructuredOutputsParams

    own: list[dict[str, Any]] = [{"seed": number} for number in range(len(problems))]
    if constrain is not None:
        for one in own:
            one["structured_outputs"] = StructuredOutputsParams(**constrain(task, problems))
    return own


def figures(run: Run, problems: Sequence[Problem], aligned: bool) -> dict[str, Any]:
    """Exact matches with their interval, and passes."""
    run.answers = [replace(answer, text=read(answer.text)) for answer in run.answers]
    match = summary(run, problems, aligned)["exact_match"]["all"]
    return {**match, "passes": run.steps}


def show(title: str, by_task: dict[str, Any]) -> None:
    """Print one line for each task."""
    print(f"\n{title}")
    for task, found in by_task.items():
        rate, passes = 100 * found["right"] / found["of"], found["passes"] / found["of"]
        low, high = (100 * bound for bound in found["interval"])
        print(f"  {task:10}{rate:6.1f} %   [{low:5.1f}, {high:5.1f}]{passes:8.2f} passes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    checkpoints = [str(TINY_LLADA2), str(TINY_GEMMA)]
    parser.add_argument("models", nargs="*", metavar="MODEL", default=checkpoints)
    parser.add_argument("--form", choices=FORMS, action="append", help="default: plain")
    parser.add_argument("--per-task", type=int, default=100, help="problems of each task")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--json", type=Path, help="write figures and answers here")
    args = parser.parse_args()
    forms = args.form or ["plain"]
    results = {
        Path(model).name: measure(model, forms, args.per_task, args.seed) for model in args.models
    }
    for row in constrained_over_free(results):
        print("  ".join(f"{cell:>14}" for cell in row))
    write(args.json, f"wrapped_tasks, {args.per_task} problems of each task", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
