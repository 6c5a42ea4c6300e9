"""Result files as Markdown tables: one function for each table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.accuracy_tables import accuracy, constrained_over_free, fidelity
from benchmarks.constraint_tables import (
    constrained_steps,
    constraint_batches,
    constraints,
    hostile_steps,
    large_schemas,
    schema_walks,
)
from benchmarks.records import Record, RefusedError
from benchmarks.replica_tables import REPLICAS, data_parallel
from benchmarks.router_tables import router, router_check, router_steps
from benchmarks.scaling_tables import TABLES as SCALING
from benchmarks.sdar_tables import sdar_tiny, sdar_wide
from benchmarks.trace_tables import traces

MEGABYTE = 1 << 20
# Systems of `benchmarks/real_size.py` -> vLLM's own class on the same weights.
PEERS = {
    "DiffusionGemma": "DiffusionGemma native",
    "DiffusionGemma FP8": "DiffusionGemma native FP8",
}


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
    columns = {
        "output_throughput": ("tokens/s", ".0f"),
        "median_ttft_ms": ("first tokens, median ms", ".0f"),
        "mean_tpot_ms": ("per token, mean ms", ".2f"),
        "median_e2el_ms": ("request, median ms", ".0f"),
        "p99_e2el_ms": ("request, 99th percentile ms", ".0f"),
        "diffusion_steps_per_canvas": ("steps per canvas", ".2f"),
        "diffusion_committed_per_step": ("tokens per step", ".2f"),
    }
    yield ["system", "concurrency", *(title for title, _ in columns.values())]
    for system, by_concurrency in results.items():
        for concurrency, figures in by_concurrency.items():
            values = ((figures[key], form) for key, (_, form) in columns.items())
            cells = ("-" if value is None else format(value, form) for value, form in values)
            yield [system, concurrency, *cells]


def gemma_side(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """The rows of one vocabulary."""
    peers = {"native": "vLLM's class", "transformers": "transformers"}
    columns = (column for peer in peers.values() for column in (peer, f"to {peer}"))
    yield ["requests", "vllm-dllm", "forward", *columns]
    for load, ours in results["vllm-dllm"].items():
        row = [_load(load), f"{ours['tokens_per_s']:.0f}", f"{100 * ours['forward_share']:.0f} %"]
        for peer in peers:
            figures = results[peer][load]
            row += [f"{figures['tokens_per_s']:.0f}", f"{figures['times_as_fast']:.2f}x"]
        yield row


def gemma(tiny: Mapping[str, Any], wide: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for left, right in zip(gemma_side(tiny), gemma_side(wide), strict=True):
        yield [*left, "", *right[1:]]


def gemma_bound(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    # Medians of the rounds in ms, and what the aimed-at ratio would leave for all but our forward.
    aim = 1.5
    yield [
        *("requests", "vllm-dllm, ms", "of it forward", "vLLM's class, ms", "of it forward"),
        *(f"{aim} times as fast, ms", "left beside our forward"),
    ]
    for load, ours in results["vllm-dllm"].items():
        sides = [ours, results["native"][load]]
        totals = [1000 * median(side["samples_s"]) for side in sides]
        forwards = [
            total * side["forward_share"] for total, side in zip(totals, sides, strict=True)
        ]
        goal = totals[1] / aim
        figures = (totals[0], forwards[0], totals[1], forwards[1], goal, goal - forwards[0])
        yield [_load(load), *(f"{ms:.0f}" for ms in figures)]


def _load(name: str) -> str:
    """The name that a table gives a workload."""
    return name.removesuffix(" equal").replace(" mixed", ", mixed lengths and steps")


def llada2(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    loops = {"cached": "loop with a KV cache", "recomputing": "loop without"}
    yield ["requests at a time", "vllm-dllm", *loops.values(), *(f"to {n}" for n in loops.values())]
    for at_once, by_loop in results.items():
        ours = by_loop["vllm-dllm"]
        speeds = (f"{by_loop[kind]:.0f}" for kind in ("vllm-dllm", *loops))
        yield [at_once, *speeds, *(f"{ours / by_loop[kind]:.2f}x" for kind in loops)]


def growth(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["requests", "ms a step", "of it outside the forward", "ms a request"]
    for requests, ms in results["steps"].items():
        outside = results["outside"][requests]
        yield [requests, f"{ms:.2f}", f"{outside:.2f}", f"{ms / int(requests):.2f}"]
    yield ["exponent", f"{results['exponent']:.2f}", "", ""]
    for requests, ms in results["after"].items():
        yield [f"{requests}, after {results['finished']} others", f"{ms:.2f}", "", ""]
    memory = results["held"]
    kv, slot = (memory[key] / 1024 for key in ("kv_bytes_per_request", "slot_bytes_per_request"))
    yield ["a request holds", f"{kv:.0f} KiB of keys and values", f"{slot:.1f} KiB of slot", ""]


def turns(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["lever", "requests", "times as fast, median", "least", "most", "turns"]
    for lever, by_requests in results.items():
        for requests, gains in by_requests.items():
            figures = (f"{figure:.2f}" for figure in (median(gains), min(gains), max(gains)))
            yield [lever, requests, *figures, f"{len(gains)}"]


def start_up(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["model", "first start, s", "second start, s", "later starts, s"]
    for name, runs in results.items():
        first, second, *later = (f"{run['ready']:.1f}" for run in runs)
        yield [name, first, second, ", ".join(later)]


def head_memory(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["class", "requests", "MB of its own", "MB a request", "seconds a step"]
    for name, usage in results.items():
        yield [
            name,
            f"{usage['requests']}",
            f"{usage['bytes'] / MEGABYTE:,.0f}",
            f"{usage['per_request'] / MEGABYTE:,.1f}",
            f"{usage['s']:.1f}",
        ]


def fdfo(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("requests at a time", "`sync` tokens/s", "`fdfo` tokens/s", "gain"),
        *("passes wasted by `sync`", "median latency", "99th percentile"),
    ]
    for requests, modes in results.items():
        sync, ours = modes["sync"], modes["fdfo"]
        wasted = sync["request_steps"] - ours["request_steps"]
        yield [
            requests,
            *(f"{mode['tokens_per_second']:.0f}" for mode in (sync, ours)),
            f"{ours['tokens_per_second'] / sync['tokens_per_second']:.2f}x",
            f"{wasted:.0f} of {sync['request_steps']:.0f}",
            *(f"{sync[key]:.3f} / {ours[key]:.3f} s" for key in ("p50_s", "p99_s")),
        ]


def prefill(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    ways = results["ways"]
    yield ["prompt tokens", *(f"{way}, ms" for way in ways), "gain", "median gain of the rounds"]
    for length, gain in results["gain"].items():
        times = (f"{by_length[length]['min_ms']:.1f}" for by_length in ways.values())
        yield [length, *times, f"{gain:.1f}x", f"{results['gain_median'][length]:.1f}x"]
    fits = results["fits"].values()
    yield ["exponent", *(f"{fit['exponent']:.2f}" if fit else "-" for fit in fits), "", ""]


def levers(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["levers", "passes a request", "tokens a pass", "passes that the lever saves"]
    for name, figures in results.items():
        passes, tokens = figures["passes_per_request"], figures["tokens_per_pass"]
        saved = f"{100 * figures['saved']:.0f} %" if figures["saved"] else ""
        yield [name, f"{passes:.2f}", f"{tokens:.2f}", saved]


def floor(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["model", "requests", "weights GB", "cache GB", "TFLOP", "floor ms", "bound by"]
    for model, by_requests in results.items():
        for requests, figures in by_requests.items():
            amounts = (figures[key] for key in ("weights_gb", "cache_gb", "tflop", "floor_ms"))
            yield [model, requests, *(f"{amount:.2f}" for amount in amounts), figures["bound"]]


def real_size(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("system", "requests", "ms a step", "floor ms", "times the floor"),
        *("steps/s", "tokens/s", "to vLLM's class"),
    ]
    systems = results["systems"]
    for name, by_requests in systems.items():
        peer = systems.get(PEERS.get(name, ""), {})
        for requests, figures in by_requests.items():
            ms, least = figures["ms"], figures["floor_ms"]
            steps, ratio = 1e3 / ms, peer.get(requests)
            tokens = steps * int(requests) * results["tokens_per_forward"]
            yield [
                *(name, requests, f"{ms:.2f}"),
                *((f"{least:.2f}", f"{ms / least:.2f}") if least else ("-", "-")),
                f"{steps:.1f}",
                f"{tokens:.0f}" if name.startswith("LLaDA2") else "-",
                f"{ratio['ms'] / ms:.2f}x" if ratio else "-",
            ]


TABLES: dict[str, Table] = {
    "step_time": Table("step_time", ("step_time",), step_time),
    "serve": Table("serve", ("serve",), serve),
    "accuracy_llada2": Table("accuracy", ("accuracy_llada2",), accuracy),
    "accuracy_gemma": Table("accuracy", ("accuracy_gemma",), accuracy),
    "wrapped_tasks": Table("wrapped_tasks", ("wrapped_tasks",), constrained_over_free),
    "wrapped_json": Table("wrapped_tasks", ("wrapped_json",), constrained_over_free),
    "gemma": Table("gemma", ("gemma", "gemma_32k"), gemma),
    "gemma_bound": Table("gemma", ("gemma",), gemma_bound),
    "llada2": Table("llada2", ("llada2",), llada2),
    "growth": Table("growth", ("growth",), growth),
    "head_memory": Table("head_memory", ("head_memory",), head_memory),
    "constraints": Table("constraints", ("constraints",), constraints),
    "constraint_batches": Table("constraint_batches", ("constraint_batches",), constraint_batches),
    "schema_walks": Table("schema_walks", ("schema_walks",), schema_walks),
    "large_schemas": Table("large_schemas", ("large_schemas",), large_schemas),
    "constrained_steps": Table("constrained_steps", ("constrained_steps",), constrained_steps),
    "constrained_steps_wide": Table(
        "constrained_steps", ("constrained_steps_wide",), constrained_steps
    ),
    "hostile_steps": Table("hostile_steps", ("hostile_steps",), hostile_steps),
    "fdfo": Table("fdfo", ("fdfo",), fdfo),
    "prefill": Table("prefill", ("prefill",), prefill),
    "turns": Table("turns", ("turns",), turns),
    "start_up": Table("start_up", ("start_up",), start_up),
    "traces": Table("traces", ("traces",), traces),
    "levers": Table("levers", ("levers",), levers),
    "floor": Table("floor", ("floor",), floor),
    "fidelity": Table("fidelity", ("fidelity",), fidelity),
    "sdar_tiny": Table("sdar", ("sdar",), sdar_tiny),
    "sdar_wide": Table("sdar", ("sdar",), sdar_wide),
    "real_size": Table("real_size", ("real_size",), real_size),
    "router": Table("router", ("router",), router),
    "data_parallel": Table("data_parallel", REPLICAS, data_parallel),
    "router_steps": Table("router_check", ("router_check",), router_steps),
    "router_check": Table("router_check", ("router_check",), router_check),
    **{name: Table("scaling", ("scaling",), rows) for name, rows in SCALING.items()},
}
