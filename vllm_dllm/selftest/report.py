"""Report a self-test: a line for each case as it ends, a table, and a JSON file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_dllm import __version__
from vllm_dllm.selftest.cases import Case
from vllm_dllm.selftest.golden import Verdict
from vllm_dllm.selftest.machine import Machine

FORMAT = 1  # of the JSON file
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
PACKAGES = ("vllm", "torch", "triton", "transformers", "flashinfer-python")


@dataclass(frozen=True)
class Result:
    """The result of a case.

    Attributes:
        case: the case.
        result: `PASSED`, `FAILED`, or `NOT_RUN` if the time was up.
        reason: why it did not pass.
        seconds: how long its process took.
        verdict: the judgement of its answers; None if it has none.
        answer: `chosen`, `seconds` and `memory` of its process.
        log: lines of its log.
    """

    case: Case
    result: str
    reason: str = ""
    seconds: float = 0.0
    verdict: Verdict | None = None
    answer: dict[str, Any] | None = None
    log: tuple[str, ...] = ()

    def line(self) -> str:
        """The result in one line."""
        detail = self.reason
        if self.verdict is not None:
            verdict = self.verdict
            same = verdict.requests - len({one["id"] for one in verdict.differ})
            counts = (
                f"{same} of {verdict.requests} requests, "
                f"{verdict.right} of {verdict.problems} problems ({verdict.reference_right})"
            )
            detail = f"{counts}; {detail}" if detail else counts
        return f"{self.result:7}  {self.seconds:5.0f} s  {self.case.name}  {detail}"


def table(results: Sequence[Result], lacking: Iterable[tuple[str, str]]) -> list[str]:
    """All results, with what each engine chose and what the machine lacks."""
    head = ("result", "case", "attention", "graphs", "kernels", "scheduling", "start", "memory")
    rows: list[tuple[str, ...]] = [head]
    for one in results:
        if one.answer is None:
            rows.append((one.result, one.case.name, one.reason, *[""] * (len(head) - 3)))
            continue
        chosen = one.answer["chosen"]
        words = (str(chosen[name]) for name in ("backend", "graphs", "kernels", "scheduling"))
        start = f"{one.answer['seconds']['start']:.1f} s"
        rows.append((one.result, one.case.name, *words, start, memory(one.answer)))
    lines = ["", *_aligned(rows), "", "not here:"]
    lines += [f"  {what}: {why}" for what, why in lacking]
    count = {kind: sum(one.result == kind for one in results) for kind in (PASSED, FAILED, NOT_RUN)}
    return [*lines, "", ", ".join(f"{number} {kind}" for kind, number in count.items())]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines; a row whose last cells are empty sets no width."""
    full = [row for row in rows if row[-1]]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]))]
    lines = ("  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def memory(answer: dict[str, Any]) -> str:
    """Memory before the engine started, once it had started, and after the requests."""
    used = answer["memory"]
    kind = "device" if "device" in used["before"] else "resident"
    places = ("before", "started", "after")
    return " -> ".join(f"{used[place][kind] / 1e6:.0f}" for place in places) + " MB"


def bench_table(figures: dict[str, Any]) -> list[str]:
    """Milliseconds of a step next to the least that this device allows."""
    lines = ["", f"{'ms of a denoise step':40}{'requests':>9}{'mean':>10}{'least':>10}"]
    for name, found in figures.items():
        if "problem" in found:
            lines.append(f"{name:40}{found['problem']}")
            continue
        for requests, step in found["steps"].items():
            lines.append(f"{name:40}{requests:>9}{step['ms']:10.2f}{step['least_ms']:10.4f}")
    measured = [found["device"] for found in figures.values() if "device" in found]
    if measured:
        bandwidth = max(one["bandwidth"] for one in measured)
        rate = max(one["rate"] for one in measured)
        lines.append(f"this device: {bandwidth / 1e9:.1f} GB/s copied, {rate / 1e12:.3f} TFLOP/s")
    return lines


def record(
    machine: Machine,
    results: Sequence[Result],
    lacking: Iterable[tuple[str, str]],
    figures: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """The whole record for JSON, which we ask users to send us."""
    return {
        "selftest": FORMAT,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "machine": machine.as_dict(),
        "versions": versions(),
        "cases": [_case(one) for one in results],
        "not_here": [{"what": what, "why": why} for what, why in lacking],
        "bench": figures,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a record, without the user's home directory in lines of logs."""
    text = json.dumps(content, indent=1).replace(str(Path.home()), "~")
    path.write_text(text + "\n", "utf-8")


def versions() -> dict[str, str]:
    """The versions of this package, of Python, and of the installed dependencies."""
    found = {"vllm-dllm": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _case(one: Result) -> dict[str, Any]:
    kept = one.answer or {}
    return {
        **one.case.as_dict(),
        "result": one.result,
        "reason": one.reason,
        "wall_s": round(one.seconds, 2),
        "verdict": asdict(one.verdict) if one.verdict is not None else None,
        **{name: kept.get(name) for name in ("chosen", "seconds", "memory")},
        "log": list(one.log),
    }
