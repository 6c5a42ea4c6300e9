"""The scheduler's part of tracing: it keeps a request's records until tokens of it leave."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from vllm_dllm.settings.resolution import ResolvedRequest
from vllm_dllm.settings.server import ThresholdUnderLoad
from vllm_dllm.vllm_seams.channels import PassFlags
from vllm_dllm.vllm_seams.channels.records import Record, put_records, take_step_records


class Recorder:
    """The records of all running requests whose steps somebody wants to know."""

    def __init__(self, load: ThresholdUnderLoad | None) -> None:
        self._load = load
        self._kept: dict[str, tuple[ResolvedRequest, list[Record]]] = {}  # by request id
        self._steps = 0
        self._began = time.monotonic()

    def begin(self, request_id: str, resolved: ResolvedRequest) -> None:
        """Keep the records of a request from now on."""
        self._kept[request_id] = resolved, []

    def note(self, output: Any, requests: int) -> None:
        """Take the records of a step with so many requests off vLLM's ``ModelRunnerOutput``."""
        self._steps += 1
        records = take_step_records(output)
        if records is None:
            return
        threshold = None if self._load is None else self._load.at(requests)
        milliseconds = int(1000 * (time.monotonic() - self._began))
        for row, index in enumerate(records.request_indices):
            kept = self._kept.get(output.req_ids[index])
            if kept is None:  # it has ended
                continue
            resolved, own = kept
            start, step, flags = records.headers[:, row].tolist()
            passed = self._steps, milliseconds, start, step, PassFlags(flags)
            logprobs, probabilities = records.scores[:, row]
            found = records.tokens[row], logprobs, probabilities
            own.append(Record(*passed, *found, threshold if resolved.follows_load else None))

    def attach(self, outputs: Iterable[Any], running: Collection[str]) -> None:
        """Send kept records with a step's outputs; forget requests that are not `running`."""
        for output in outputs:
            resolved, records = self._kept.get(output.request_id, (None, []))
            if resolved is not None and records:
                put_records(output, resolved.step_details, records)
                records.clear()
        for ended in self._kept.keys() - running:
            del self._kept[ended]
