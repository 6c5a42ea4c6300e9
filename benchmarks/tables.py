"""Result files, and one function for each Markdown table that is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = ("benchmark", "command", "commit", "modified", "versions", "machine", "results")
KINDS = (
    *("accuracy", "constrained_steps", "fidelity", "gemma", "levers", "real_size"),
    *("sdar", "serve", "start_up", "step_time"),
)
# Systems of `benchmarks/real_size.py` -> vLLM's own class on the same weights.
PEERS = {
    "DiffusionGemma": "DiffusionGemma native",
    "DiffusionGemma FP8": "DiffusionGemma native FP8",
}
WAYS = {
    "two blocks": "commits with every step of the next block",
    "granted": "with its first step (synchronous scheduling)",
    "separate": "in passes of their own",
    "loop": "loop in transformers with a KV cache",
    "autoregressive": "vLLM, autoregressive",
}


class RefusedError(ValueError):
    """A result file, a table or a marker that cannot be used; says which and why."""


@dataclass(frozen=True)
class Record:
    """One result file, as `benchmarks.common.write` leaves it.

    Attributes:
        name: of the file.
        kind: of benchmark, one of `KINDS`.
        fields: everything beside the results: command, commit, versions, machine.
        results: the benchmark's own.
    """

    name: str
    kind: str
    fields: Mapping[str, Any]
    results: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file.

        Raises:
            RefusedError: not JSON, fields missing, or not one of our benchmarks.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RefusedError(f"{path.name}: not JSON ({error})") from error
        if not isinstance(content, dict):
            raise RefusedError(f"{path.name}: not a JSON object")
        missing = [field for field in REQUIRED if field not in content]
        if missing:
            raise RefusedError(
                f"{path.name}: has no {', '.join(missing)}; older than benchmarks/common.py, or "
                "not written by it: run its benchmark again"
            )
        # Beside its name a benchmark may say how it was run: "accuracy, offline, 700 problems".
        kind = str(content["benchmark"]).split(",")[0]
        if kind not in KINDS:
            raise RefusedError(
                f"{path.name}: unknown benchmark {kind!r}; known: {', '.join(KINDS)}"
            )
        return cls(path.name, kind, content, content["results"])

    def source(self) -> str:
        """File, code and machine in one line. The file has the command and more of the machine."""
        machine, versions = self.fields["machine"], self.fields["versions"]
        changed = " with uncommitted changes" if self.fields["modified"] else ""
        return (
            f"`benchmarks/results/{self.name}`: commit {self.fields['commit'][:7]}{changed}, "
            f"{machine.get('gpu') or machine['cpu']}, vLLM {versions['vllm']}"
        )


@dataclass(frozen=True)
class Table:
    """How a table is made.

    Attributes:
        kind: of benchmark that its files must hold.
        files: stems of the files; all of them are needed.
        rows: of their results: the header, then the rows.
    """

    kind: str
    files: tuple[str, ...]
    rows: Callable[..., Iterable[Sequence[str]]]


def section(name: str, records: Mapping[str, Record]) -> str:
    """A table and where it comes from, as Markdown.

    Raises:
        RefusedError: a file is absent, of another benchmark, or its results are laid out otherwise.
    """
    table = TABLES[name]
    absent = [f"{stem}.json" for stem in table.files if stem not in records]
    if absent:
        raise RefusedError(f"table {name}: {', '.join(absent)} is absent or refused")
    used = [records[stem] for stem in table.files]
    names = ", ".join(record.name for record in used)
    for record in used:
        if record.kind != table.kind:
            raise RefusedError(f"{record.name}: is of {record.kind}, table {name} of {table.kind}")
    try:
        lines = list(markdown(table.rows(*(record.results for record in used))))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RefusedError(
            f"{names}: not the layout of today's {table.kind} ({type(error).__name__}: {error}); "
            "run the benchmark again"
        ) from error
    return "\n".join([*lines, "", *(f"({record.source()})" for record in used)])


def markdown(rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """The lines of a table; the first row is its header."""
    for number, row in enumerate(rows):
        yield "|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|"
        if number == 0:
            yield "|" + "---|" * len(row)


def step_time(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    parts = ("schedule", "prepare", "forward", "head", "decoding", "rest", "total")
    yield ["requests", *parts, "outside the forward"]
    for requests, times in results.items():
        outside = times["total"] - times["forward"]
        yield [requests, *(f"{times[part]:.2f}" for part in parts), f"{outside:.2f}"]


def serve(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["system", *next(iter(results.values()))]
    for system, by_concurrency in results.items():
        yield [
            system,
            *(
                f"{figures['output_throughput']:.0f}, {figures['median_e2el_ms']:.0f} ms"
                for figures in by_concurrency.values()
            ),
        ]


def gemma_side(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """The rows of one vocabulary."""
    yield ["requests", "tokens/s", "to vLLM's class", "to transformers"]
    for load, ours in results["vllm-dllm"].items():
        peers = (results[peer][load]["times_as_fast"] for peer in ("native", "transformers"))
        yield [_load(load), f"{ours['tokens_per_s']:.0f}", *(f"{times:.2f}x" for times in peers)]


def gemma(tiny: Mapping[str, Any], wide: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for left, right in zip(gemma_side(tiny), gemma_side(wide), strict=True):
        yield [*left, "", *right[1:]]


def _load(name: str) -> str:
    """The name that a table gives a workload."""
    return name.removesuffix(" equal").replace(" mixed", ", mixed lengths and steps")


def start_up(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["model", "first start, s", "second start, s", "later starts, s"]
    for name, runs in results.items():
        first, second, *later = (f"{run['ready']:.1f}" for run in runs)
        yield [name, first, second, ", ".join(later)]


def real_size(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("system", "attention", "requests", "ms a step", "floor ms", "times the floor"),
        *("GPU idle ms", "tokens/s", "to vLLM's class"),
    ]
    systems = results["systems"]
    for name, found in systems.items():
        peer = systems.get(PEERS.get(name, ""), {}).get("requests", {})
        for requests, figures in found["requests"].items():
            if "ms" not in figures:
                continue
            ms, least, idle = figures["ms"], figures["floor_ms"], figures.get("idle_ms")
            tokens = figures["tokens_per_s"]
            ratio = peer.get(requests, {}).get("ms")
            yield [
                *(name, found["engine"]["attention"], requests, f"{ms:.2f}"),
                *((f"{least:.2f}", f"{ms / least:.2f}") if least else ("-", "-")),
                "-" if idle is None else f"{idle:.2f}",
                "-" if tokens is None else f"{tokens:.0f}",
                f"{ratio / ms:.2f}x" if ratio else "-",
            ]


def fidelity(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """The rows of the documentation's table: the header, then the rows."""
    yield [
        *("model", "dtype", "median error", "worst", "of the logits", "same likeliest id"),
        *("answers equal, alone", "batched", "alone as batched"),
    ]
    for model, by_dtype in results.items():
        for dtype, found in by_dtype.items():
            last = found["layers"][-1]
            counts = (found[key] for key in ("alone", "batched", "alone_and_batched"))
            yield [
                *(model, dtype),
                *(f"{last[key]:.1e}" for key in ("median", "worst", "logits")),
                f"{100 * last['likeliest']:.1f} %",
                *(f"{count} of {found['prompts']}" for count in counts),
            ]


def constrained_steps(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("vocabulary", "constraints", "CPU ms a step", "to none", "CPU ms of the first steps"),
        "to none",
    ]
    for vocabulary, by_kind in results.items():
        for kind, figures in by_kind.items():
            yield [
                *(vocabulary, kind),
                *(f"{figures['cpu_ms']:.1f}", f"{figures['cpu_ratio']:.2f}x"),
                f"{figures['first_steps_cpu_ms']:.1f}",
                f"{figures['first_steps_cpu_ratio']:.2f}x",
            ]


def sdar_tiny(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["requests at a time", "vllm-dllm", "loop, so many in lockstep", "to it", "to one by one"]
    alone = results["tiny"]["1"]["loop"]
    for at_once, speed in results["tiny"].items():
        ours, loop = speed["vllm-dllm"], speed["loop"]
        ratios = f"{ours / loop:.2f}x", f"{ours / alone:.2f}x"
        yield [at_once, f"{ours:.0f}", f"{loop:.0f}", *ratios]


def sdar_wide(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["system", *results["wide"]]
    for name, title in WAYS.items():
        cells = []
        for systems in results["wide"].values():
            speed = systems[name]["tokens_per_second"]
            ratio = speed / systems["separate"]["tokens_per_second"]
            cells.append(f"{speed:.1f} ({ratio:.2f}x)")
        yield [title, *cells]


def levers(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["model", "setting", "right, %", "passes", "tokens/s"]
    for model, by_lever in results.items():
        for name, found in by_lever.items():
            score = found["exact_match"]["all"]
            yield [
                *(model, name, f"{100 * score['right'] / score['of']:.1f}"),
                *(f"{found['steps']:.0f}", f"{found['tokens_per_second']:.0f}"),
            ]


TABLES: dict[str, Table] = {
    "step_time": Table("step_time", ("step_time",), step_time),
    "serve": Table("serve", ("serve",), serve),
    "gemma": Table("gemma", ("gemma", "gemma_32k"), gemma),
    "constrained_steps": Table("constrained_steps", ("constrained_steps",), constrained_steps),
    "start_up": Table("start_up", ("start_up",), start_up),
    "fidelity": Table("fidelity", ("fidelity",), fidelity),
    "sdar_tiny": Table("sdar", ("sdar",), sdar_tiny),
    "sdar_wide": Table("sdar", ("sdar",), sdar_wide),
    "real_size": Table("real_size", ("real_size",), real_size),
    "levers": Table("levers", ("levers",), levers),
}
