"""Problems with one exact answer, from seeded generators, with a split that cannot leak.

    python -m examples.tiny.tasks            # a few of each task
    python -m examples.tiny.tasks --held-out 50 > problems.jsonl

A problem is held out when a checksum of its text says so, whatever seed drew it. The
training scripts skip those, so no seed and no number of steps can train on them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

HELD_OUT_OF = 8  # one problem text in this many is held out


@dataclass(frozen=True)
class Problem:
    """What the user asks and the only right answer."""

    task: str
    prompt: str
    answer: str


def add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"{a} + {b}", str(a + b)


def subtract(rng: random.Random) -> tuple[str, str]:
    a, b = sorted((rng.randrange(100), rng.randrange(100)), reverse=True)
    return f"{a} - {b}", str(a - b)


def sort(rng: random.Random) -> tuple[str, str]:
    numbers = _numbers(rng, 5)
    return f"sort {_words(numbers)}", _words(sorted(numbers))


def reverse(rng: random.Random) -> tuple[str, str]:
    numbers = _numbers(rng, 8)
    return f"reverse {_words(numbers)}", _words(numbers[::-1])


def evaluate(rng: random.Random) -> tuple[str, str]:
    """Three one-digit numbers; a sum or difference in brackets, and any operation outside."""
    a, b, c = (rng.randint(1, 9) for _ in range(3))
    inner, outer = rng.choice("+-"), rng.choice("+-*")
    text = rng.choice((f"({a}{inner}{b}){outer}{c}", f"{a}{outer}({b}{inner}{c})"))
    return text, str(_value(text))


def copy(rng: random.Random) -> tuple[str, str]:
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=rng.randint(4, 32)))
    return f"copy {text}", text


def count(rng: random.Random) -> tuple[str, str]:
    first = rng.randint(1, 190)
    last = first + rng.randint(1, 7)
    return f"count from {first} to {last}", _words(list(range(first, last + 1)))


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    task.__name__: task for task in (add, subtract, sort, reverse, evaluate, copy, count)
}


def held_out(prompt: str) -> bool:
    """Whether a problem belongs to the held-out split; depends on its text alone."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_OF == 0


def problems(task: str, seed: int, *, test: bool) -> Iterator[Problem]:
    """An endless stream of problems of one split.

    Raises:
        KeyError: there is no such task.
    """
    make, rng = TASKS[task], random.Random(f"{task} {seed}")
    while True:
        prompt, answer = make(rng)
        if held_out(prompt) == test:
            yield Problem(task, prompt, answer)


def held_out_set(per_task: int, seed: int = 0) -> list[Problem]:
    """`per_task` different held-out problems of every task, task by task.

    Raises:
        ValueError: a task has not that many (the smallest, count, has about 150).
    """
    chosen: dict[str, Problem] = {}
    for task in TASKS:
        stream, wanted = problems(task, seed, test=True), len(chosen) + per_task
        for problem in itertools.islice(stream, 100 * per_task + 1000):
            chosen[problem.prompt] = problem
            if len(chosen) == wanted:
                break
        else:
            raise ValueError(f"{task} has fewer than {per_task} different held-out problems")
    return list(chosen.values())


def _numbers(rng: random.Random, most: int) -> list[int]:
    return [rng.randint(10, 99) for _ in range(rng.randint(3, most))]


def _words(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _value(text: str) -> int:
    """The value of a text that `evaluate` itself wrote: digits, + - * and brackets."""
    return int(eval(text, {"__builtins__": {}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--held-out", type=int, metavar="N", help="N held-out problems a task, as JSON lines"
    )
    args = parser.parse_args()
    for problem in held_out_set(args.held_out or 3):
        if args.held_out:
            print(json.dumps(asdict(problem)))
        else:
            print(f"{problem.task:<10}{problem.prompt:<40}{problem.answer}")


if __name__ == "__main__":
    main()
