"""Result files, as `benchmarks.common.write` leaves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = ("benchmark", "command", "commit", "modified", "versions", "machine", "results")
KINDS = (
    *("accuracy", "constrained_steps", "constraint_batches", "constraints", "data_parallel"),
    *("fdfo", "fidelity", "floor", "gemma", "growth", "head_memory", "hostile_steps"),
    *("large_schemas", "levers", "llada2", "prefill", "real_size", "router", "router_check"),
    *("scaling", "schema_walks", "sdar", "serve", "start_up", "step_time", "traces"),
    *("turns", "wrapped_tasks"),
)
# Former benchmark -> the one that took its place.
REPLACED = {"serving": "benchmarks/serve.py"}


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
            RefusedError: no JSON, fields missing, or no benchmark of ours.
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
        if kind in REPLACED:
            raise RefusedError(f"{path.name}: old, of {kind!r}; run {REPLACED[kind]} in its place")
        if kind not in KINDS:
            raise RefusedError(
                f"{path.name}: unknown benchmark {kind!r}; known: {', '.join(KINDS)}"
            )
        return cls(path.name, kind, content, content["results"])

    def source(self) -> str:
        """File, code and machine in one line. The command is in the file."""
        machine, versions = self.fields["machine"], self.fields["versions"]
        changed = " with uncommitted changes" if self.fields["modified"] else ""
        load, gpu, threads = (machine.get(name) for name in ("load_average", "gpu", "threads"))
        busy = f", {threads} threads" if (threads or 1) > 1 else ""
        busy += f", load average {load[0]:.1f}" if load else ""
        return (
            f"`benchmarks/results/{self.name}`: commit {self.fields['commit'][:7]}{changed}; "
            f"{f'{gpu}, ' if gpu else ''}{machine['cpu']}, {machine['cores']} cores{busy}; "
            f"vLLM {versions['vllm']}, torch {versions['torch']}"
        )
