"""What do constraints cost a step of several requests, with one schema and with different ones?

    .venv/bin/python benchmarks/constraint_batches.py [--json PATH] [--repeats 10]

No model runs: a step works on random logits of 151,936 ids at L = 32. For 1 and 16 requests the
benchmark gives the milliseconds of a greedy and of a sampled step, where all positions are free and
where half of them are decided, beside the row statistics that a step without constraints computes
from the same logits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.common import quiet_engines, write  # noqa: E402
from benchmarks.constraints import (  # noqa: E402
    CONSTRAINTS,
    STRING,
    compile_timed,
    far_to_go,
    joined,
    milliseconds,
    real_tokens,
    rounded,
)
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary  # noqa: E402
from vllm_dllm.constraints.automaton.windows import Window  # noqa: E402
from vllm_dllm.constraints.decoding.canvas_logits import CanvasLogits  # noqa: E402
from vllm_dllm.constraints.decoding.constrained_step import best_tokens, drawn_tokens  # noqa: E402
from vllm_dllm.ops.noise.keyed import row_keys  # noqa: E402
from vllm_dllm.ops.statistics.rows import row_statistics  # noqa: E402

IDS, LENGTH, REQUESTS = 151_936, 32, 16


def different_schemas(count: int) -> list[dict[str, Any]]:
    """Records with other names, lengths and numbers of fields each."""
    return [
        {
            "type": "object",
            "properties": {
                f"name_{n}": STRING if n % 2 else {"type": "string", "maxLength": 10 + n},
                f"age_{n}": {"type": "integer", "minimum": 0, "maximum": 100 + n},
                **{f"flag_{n}_{k}": {"type": "boolean"} for k in range(n % 4)},
            },
            "required": [f"name_{n}", f"age_{n}"],
        }
        for n in range(count)
    ]


def batch(parts: list[Window], decided: float, repeats: int) -> dict[str, float]:
    """Milliseconds of a step of canvases of which a share of the positions is decided."""
    count, length = len(parts), LENGTH
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, length, IDS, generator=generator) * 3
    logits, constraint = CanvasLogits.every(rows), joined(parts)
    free = far_to_go(parts, length, torch.full((count, length), -1))
    keep = torch.rand(count, length, generator=generator) < decided
    best = logits.best(rows.argmax(-1))
    path = best_tokens(constraint, logits, free, best).token
    window = far_to_go(parts, length, torch.where(keep, path, -1))
    keys = row_keys(torch.arange(count)[:, None], torch.arange(length))

    def sampled() -> None:
        drawn = logits.drawn(window.wanted(), keys)
        drawn_tokens(constraint, logits, window, drawn, keys)

    return {
        "without_ms": milliseconds(lambda: row_statistics(rows.flatten(0, 1), 0), repeats),
        "greedy_ms": milliseconds(lambda: best_tokens(constraint, logits, window, best), repeats),
        "sampled_ms": milliseconds(sampled, repeats),
    }


def batches(repeats: int) -> dict[str, Any]:
    """Steps of 1 and 16 requests by schemas, requests and share of decided positions."""
    tokens = real_tokens()
    missing = [b""] * (IDS - len(tokens) - 1)
    vocabulary = Vocabulary.of([*tokens, b"", *missing], [len(tokens)])

    def compiled(schema: dict[str, Any]) -> Window:
        return compile_timed("json_schema", schema, vocabulary, LENGTH)[0]

    one = [compiled(CONSTRAINTS[name][1]) for name in ("tool call", "four fields")]
    different = [compiled(schema) for schema in different_schemas(REQUESTS)]
    cases = {
        "tool call": one[:1],
        "16 times tool call": one[:1] * REQUESTS,
        "four fields": one[1:],
        "16 times four fields": one[1:] * REQUESTS,
        "first of 16 schemas": different[:1],
        "16 times the first of 16 schemas": different[:1] * REQUESTS,
        "16 schemas": different,
    }
    results: dict[str, Any] = {}
    for name, automata in cases.items():
        for decided in (0.0, 0.5):
            figures = batch(automata, decided, repeats)
            results.setdefault(name, {})[str(decided)] = figures
            print(f"{name}, {decided:.0%} decided: {rounded(figures)}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    quiet_engines()
    torch.set_num_threads(1)
    write(args.json, "constraint_batches", batches(args.repeats))


if __name__ == "__main__":
    main()
