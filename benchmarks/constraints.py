"""What does a constraint cost: once to compile, and then at every step?

    .venv/bin/python benchmarks/constraints.py [--json PATH] [--only date] [--repeats 20]

No model runs: a step works on random logits of a canvas. There are two vocabularies: that of the
tiny LLaDA2 checkpoint, and the 150,000 tokens of a tokenizer that vLLM's dependency
``mistral_common`` brings along (random pieces of bytes where it is absent). For each constraint and
canvas length, the benchmark gives the milliseconds of the parts of a greedy step (from logits to
weights of classes; the best path) and of a sampled step (the same, and a token of each class). It
also gives those of the row statistics that a step without a constraint computes from these logits.
`constraint_batches` measures whole steps of several requests.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.common import quiet_engines, write  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402
from vllm_dllm.constraints.automaton.compilation import Constraint, constraint_language  # noqa: E402
from vllm_dllm.constraints.automaton.configurations import START, Configurations  # noqa: E402
from vllm_dllm.constraints.automaton.pushdown import pushdown_tables  # noqa: E402
from vllm_dllm.constraints.automaton.rule_automata import rule_automata  # noqa: E402
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary  # noqa: E402
from vllm_dllm.constraints.automaton.windows import Window, window  # noqa: E402
from vllm_dllm.constraints.decoding.automaton_batch import AutomatonBatch, OwnEdges  # noqa: E402
from vllm_dllm.constraints.decoding.best_path import (  # noqa: E402
    CanvasWindow,
    best_paths,
    drawn_paths,
)
from vllm_dllm.constraints.decoding.class_tokens import draw_in_class  # noqa: E402
from vllm_dllm.constraints.decoding.class_weights import (  # noqa: E402
    CanvasLogits,
    class_logsumexp,
    class_maxima,
)
from vllm_dllm.constraints.decoding.constrained_step import BatchConstraint  # noqa: E402
from vllm_dllm.constraints.decoding.token_classes import BatchClasses, TokenClasses  # noqa: E402
from vllm_dllm.constraints.limits import CompileLimits  # noqa: E402
from vllm_dllm.ops.noise.keyed import row_keys  # noqa: E402
from vllm_dllm.ops.statistics.rows import row_statistics  # noqa: E402

LENGTHS = (32, 256)
REAL = "150,000 tokens"
STRING = {"type": "string"}
PERSON = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "email": {"type": "string", "format": "email"},
    "active": {"type": "boolean"},
}
CALL = {
    "name": {"enum": ["get_weather"]},
    "parameters": {
        "type": "object",
        "properties": {"city": STRING, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    },
}
CONSTRAINTS: dict[str, tuple[str, Any]] = {
    "choice": ("choice", ["positive", "negative", "neutral"]),
    "date": ("regex", r"(?a)\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
    "e-mail": ("regex", r"[a-z0-9._%+-]+@[a-z0-9-]+(\.[a-z0-9-]+)+"),
    "tool call": (
        "json_schema",
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {"type": "object", "anyOf": [{"properties": CALL, "required": list(CALL)}]},
        },
    ),
    "four fields": (
        "json_schema",
        {"type": "object", "properties": PERSON, "required": list(PERSON)},
    ),
    "20 records": (
        "json_schema",
        {
            "type": "array",
            "maxItems": 20,
            "items": {"type": "object", "properties": PERSON, "required": ["name"]},
        },
    ),
}


def real_tokens() -> list[bytes]:
    """Tokens of a real byte-level vocabulary, or pieces of bytes where there is none."""
    package = util.find_spec("mistral_common")
    path = Path(package.origin or "").parent / "data" / "tekken_240911.json" if package else Path()
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        return [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 9, size=149_744)
    letters = rng.choice(np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ABC,.0", np.uint8), sizes.sum())
    pieces = np.split(letters, sizes.cumsum()[:-1])
    return [*(bytes([byte]) for byte in range(256)), *(piece.tobytes() for piece in pieces)]


def vocabularies() -> dict[str, Vocabulary]:
    """Vocabularies by the names that the table gives them."""
    path = TINY_LLADA2 / "tokenizer.json"
    tokens = real_tokens()
    return {
        "272 tokens": Vocabulary.read(path.read_text(encoding="utf-8"), 272, [257]),
        REAL: Vocabulary.of([*tokens, b""], [len(tokens)]),
    }


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of some runs, after one run that does not count."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def compile_timed(
    kind: str, value: Any, vocabulary: Vocabulary, length: int
) -> tuple[Window, dict[str, float]]:
    """What a first canvas follows, its size, and the milliseconds that finding it takes."""
    limits = CompileLimits()
    began = time.perf_counter()
    automata = rule_automata(constraint_language(Constraint.of(kind, value), limits), limits)
    between = time.perf_counter()
    tables = pushdown_tables(automata, vocabulary, limits)
    configurations = Configurations(tables, limits.calls)
    found = window(configurations, START, length, limits.window_states)
    behind = time.perf_counter()
    again = milliseconds(
        lambda: window(configurations, START, length, limits.window_states), repeats=3
    )
    return found, {
        "bytes_ms": (between - began) * 1e3,
        "tokens_ms": (behind - between) * 1e3,
        "window_ms": again,
        "rule_states": tables.states,
        "states": found.automaton.states,
        "whole": found.whole,
        "classes": tables.classes,
        "edges": len(found.automaton.edge_label),
    }


def joined(parts: list[Window]) -> BatchConstraint:
    """What canvases that follow these parts of constraints follow; equal objects share classes."""
    edges = {id(one): OwnEdges.of(one.automaton, one.depth) for one in parts}
    classes = {
        id(one): TokenClasses.of(one.automaton.class_of_token, one.automaton.classes)
        for one in parts
    }
    return BatchConstraint(
        AutomatonBatch.of([edges[id(one)] for one in parts], torch.from_numpy),
        BatchClasses.of([classes[id(one)] for one in parts]),
    )


def far_to_go(parts: list[Window], length: int, forced: torch.Tensor) -> CanvasWindow:
    """Windows of canvases whose budget is no limit."""
    zero = torch.zeros(len(parts), dtype=torch.int64)
    budget = torch.tensor([10 * length + int(one.automaton.distance[0]) for one in parts])
    return CanvasWindow(zero, zero, budget, zero + length, forced)


def step(compiled: Window, ids: int, length: int, repeats: int) -> dict[str, float]:
    """Milliseconds of each part of a step of one canvas that has far to go."""
    constraint = joined([compiled])
    automata, classes = constraint.automata, constraint.classes
    rows = torch.randn(length, ids, generator=torch.Generator().manual_seed(0)) * 3
    logits = CanvasLogits.every(rows[None])
    window = far_to_go([compiled], length, torch.full((1, length), -1))
    wanted, kind = window.wanted(), constraint.kind_of_forced(window)
    keys = row_keys(torch.arange(length))[None]
    most, some = logits.best(rows.argmax(-1)[None]), logits.drawn(wanted, keys)
    best = class_maxima(logits, classes, wanted, most).by_class
    total = class_logsumexp(logits, classes, wanted, some)
    drawn = drawn_paths(automata, total.by_class, window, kind, some.weight, keys)
    if not drawn.feasible.all():
        raise RuntimeError("a canvas with a large budget has a path")
    return {
        "without_ms": milliseconds(lambda: row_statistics(rows, 0), repeats),
        "best_weights_ms": milliseconds(
            lambda: class_maxima(logits, classes, wanted, most), repeats
        ),
        "best_path_ms": milliseconds(
            lambda: best_paths(automata, best, window, kind, most.weight), repeats
        ),
        "free_draw_ms": milliseconds(lambda: logits.drawn(wanted, keys), repeats),
        "sums_ms": milliseconds(lambda: class_logsumexp(logits, classes, wanted, some), repeats),
        "drawn_path_ms": milliseconds(
            lambda: drawn_paths(automata, total.by_class, window, kind, some.weight, keys), repeats
        ),
        "drawn_token_ms": milliseconds(
            lambda: draw_in_class(logits, classes, total.by_chunk, drawn.classes, keys), repeats
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", choices=sorted(CONSTRAINTS), help="one constraint")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    quiet_engines()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for size, vocabulary in vocabularies().items():
        for name, (kind, value) in CONSTRAINTS.items():
            if args.only not in (None, name):
                continue
            figures: dict[str, Any] = {}
            steps = {}
            for length in args.lengths:
                found, figures = compile_timed(kind, value, vocabulary, length)
                steps[str(length)] = step(found, len(vocabulary), length, args.repeats)
            results.setdefault(size, {})[name] = {**figures, "steps": steps}
            print(f"{size}, {name}: {rounded(figures)}", flush=True)
            for length, parts in steps.items():
                print(f"    L = {length}: {rounded(parts)}", flush=True)
    write(args.json, "constraints", results)


def rounded(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


if __name__ == "__main__":
    main()
