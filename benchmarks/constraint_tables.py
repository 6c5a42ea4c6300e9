"""Tables of constraints: what they cost in a step, and what compiling the largest ones takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What a refusal is about, by the words that its message has in every version of the code.
REASONS = {
    r"positions|characters": "expression",
    r"states over bytes": "states",
    r"pairs of|edges|kinds|cells": "table",
    r"CPU time|time or memory": "time",
    r"memory": "memory",
    r"alternatives": "alternatives",
    r"any JSON": "any JSON",
}


def constraints(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("vocabulary", "constraint", "states", "classes", "compiled in", "L"),
        *("without", "greedy: weights + path", "sampled: draw + weights + path + tokens"),
    ]
    for vocabulary, by_constraint in results.items():
        for name, figures in by_constraint.items():
            compiled = figures["bytes_ms"] + figures["tokens_ms"]
            for length, parts in figures["steps"].items():
                greedy = [parts["best_weights_ms"], parts["best_path_ms"]]
                names = ("free_draw_ms", "sums_ms", "drawn_path_ms", "drawn_token_ms")
                drawn = [parts[name] for name in names]
                yield [
                    *(vocabulary, name, f"{figures['states']}", f"{figures['classes']}"),
                    *(f"{compiled:.0f} ms", length, f"{parts['without_ms']:.1f} ms"),
                    *(
                        " + ".join(f"{part:.1f}" for part in times) + " ms"
                        for times in (greedy, drawn)
                    ),
                ]


def constraint_batches(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["requests", "positions decided", "without", "greedy", "sampled"]
    for name, by_share in results.items():
        for share, figures in by_share.items():
            times = (figures[key] for key in ("without_ms", "greedy_ms", "sampled_ms"))
            yield [name, f"{float(share):.0%}", *(f"{each:.0f} ms" for each in times)]


def schema_walks(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("schemas", "served", "walks", "different texts", "not valid"),
        *("valid instances", "accepted", "invalid instances", "accepted"),
    ]
    for name, found in results.items():
        served = found["compiled"] - found["compile_seconds"]["above_1.5"]
        counts = ("walks", "texts", "texts_not_valid", "valid_instances", "accepted")
        yield [
            f"{name}: {found['schemas']:,}",
            f"{served:,} ({served / found['schemas']:.1%})",
            *(f"{found[key]:,}" for key in (*counts, "invalid_instances", "invalid_accepted")),
        ]


def large_schemas(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    after, before = results["after"]["schemas"], results.get("before", {}).get("schemas", {})
    vocabularies = ("272 tokens", "150,000 tokens")
    yield [
        *("schema", "characters", "states"),
        *(f"{when}, {name}" for name in vocabularies for when in ("before", "now")),
        "kinds",
    ]
    for name, found in after.items():
        figures = [
            _cost(by_name.get(name, {}).get(vocabulary))
            for vocabulary in vocabularies
            for by_name in (before, after)
        ]
        large = found["150,000 tokens"]
        sizes = (f"{large[key]:,}" if key in large else "-" for key in ("states", "kinds"))
        states, kinds = sizes
        shown = name.partition("---")[2].replace("_Normalized", "") or name
        yield [shown, f"{found['characters']:,}", states, *figures, kinds]
    yield ["served", "", "", *(_served(by, v) for v in vocabularies for by in (before, after)), ""]


def _served(schemas: Mapping[str, Any], vocabulary: str) -> str:
    served = [found for found in schemas.values() if "refused" not in found[vocabulary]]
    return f"{len(served)} of {len(schemas)}"


def _cost(run: Mapping[str, Any] | None) -> str:
    """CPU seconds and memory, or what a refusal is about."""
    if run is None:
        return "-"
    if "refused" not in run:
        return f"{run['seconds']:.2f} s, {run['mib']} MiB"
    about = next((word for words, word in REASONS.items() if re.search(words, run["refused"])),
                 "keyword")  # fmt: skip
    return f"refused: {about}" + (f" ({run['seconds']:.1f} s)" if about == "time" else "")


def constrained_steps(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("vocabulary", "16 requests", "CPU ms a step", "to none", "CPU ms of the first steps"),
        "to none",
    ]
    for vocabulary, by_kind in results.items():
        for kind, figures in by_kind.items():
            yield [
                *(vocabulary, "no constraint" if kind == "none" else kind),
                *(f"{figures['cpu_ms']:.1f}", f"{figures['cpu_ratio']:.2f}x"),
                f"{figures['first_steps_cpu_ms']:.1f}",
                f"{figures['first_steps_cpu_ratio']:.2f}x",
            ]


def hostile_steps(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["vocabulary", "ms a step", "alone", "beside a hostile client", "ratio"]
    for vocabulary, figures in results.items():
        for name, key in (("median", "median_ms"), ("99th percentile", "p99_ms")):
            alone, beside = figures[key]
            ratio = f"{beside / alone:.2f}x"
            yield [vocabulary, name, f"{alone:.1f}", f"{beside:.1f}", ratio]
