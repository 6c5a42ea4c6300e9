"""How far the engine is from float32 references: layer by layer, and in its answers.

    .venv/bin/python benchmarks/fidelity.py --json benchmarks/results/fidelity.json
    .venv/bin/python benchmarks/fidelity.py --model tiny-llada2 --per-task 100

Each model answers in float32 and in bfloat16. An error is that of a layer's output over the same
tokens, relative to the output itself; the table has the last layer's, the JSON file all. Answers
are compared with those of the reference, with every prompt alone and with all prompts at once.
`mini-slice` has two layers of LLaDA2.0-mini at its published widths with random weights, whose
decisions are much closer to each other than a trained model's. It takes 16 GiB of memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process, write  # noqa: E402
from benchmarks.tables import fidelity as rows  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from tests.support.engine import engine  # noqa: E402
from tests.support.fidelity_subjects import (  # noqa: E402
    BLOCK,
    Subject,
    answers,
    errors,
    mini_slice,
    tiny_gemma,
    tiny_llada2,
)

MODELS = ("tiny-llada2", "tiny-diffusiongemma", "mini-slice")
DTYPES = ("float32", "bfloat16")


def subject_of(model: str, per_task: int, folder: Path) -> Subject:
    """A model with its prompts and its reference's answers; `folder` takes a checkpoint."""
    makers: dict[str, Callable[[], Subject]] = {
        "tiny-llada2": partial(tiny_llada2, per_task),
        "tiny-diffusiongemma": partial(tiny_gemma, per_task),
        "mini-slice": partial(mini_slice, folder),
    }
    return makers[model]()


def measured(subject: Subject, dtype: str) -> dict[str, Any]:
    """Errors by layer, and how many answers are equal."""
    with engine(subject.path, BLOCK, dtype=dtype, **subject.options) as running:
        layers = [asdict(error) for error in errors(subject, running)]
        alone, batched = answers(subject, running)
    return {
        "layers": layers,
        "prompts": len(alone),
        "alone": equal(alone, subject.answers),
        "batched": equal(batched, subject.answers),
        "alone_and_batched": equal(alone, batched),
    }


def equal(some: list[list[int]], others: list[list[int]]) -> int:
    """How many answers are the same in both lists."""
    return sum(one == other for one, other in zip(some, others, strict=True))


def main() -> None:
    """Measure each model in each dtype, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--per-task", type=int, default=30, help="prompts of each of seven tasks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for model in args.model:
        with tempfile.TemporaryDirectory() as folder:
            subject = subject_of(model, args.per_task, Path(folder))
            results[model] = {dtype: measured(subject, dtype) for dtype in DTYPES}
    for row in rows(results):
        print(" | ".join(row))
    write(args.json, "fidelity", results)


if __name__ == "__main__":
    main()
