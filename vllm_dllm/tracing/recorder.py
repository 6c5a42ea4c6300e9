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
        """Begin without records; `load` is the server's setting."""
        self._load = load
        # By request id: its `StepDetails` and its records.
        self._kept: dict[str, tuple[int, list[Record]]] = {}
        self._follows: set[str] = set()
        self._steps = 0
        self._began = time.monotonic()

    def begin(self, request_id: str, resolved: ResolvedRequest) -> None:
        """Keep the records of a request from now on."""
        self._kept[request_id] = resolved.step_details, []
        if resolved.follows_load:
            self._follows.add(request_id)

    def note(self, output: Any, requests: int) -> None:
        """Take the records of a step off vLLM's ``ModelRunnerOutput``, and keep them.

        `requests` is the number of requests that the step had.
        """
        self._steps += 1
        records = take_step_records(output)
        if records is None:
            return
        threshold = None if self._load is None else self._load.at(requests)
        milliseconds = int(1000 * (time.monotonic() - self._began))
        for row, index in enumerate(records.request_indices):
            request_id = output.req_ids[index]
            kept = self._kept.get(request_id)
            if kept is None:  # it has ended
                continue
            start, step, flags = records.headers[:, row].tolist()
            arrays = (records.tokens[row], *records.scores[:, row])
            record = Record(self._steps, milliseconds, start, step, PassFlags(flags), *arrays)
            if request_id in self._follows:
                record = record._replace(threshold=threshold)
            kept[1].append(record)

    def attach(self, outputs: Iterable[Any], running: Collection[str]) -> None:
        """Send the kept records of requests with the tokens that leave now.

        Args:
            outputs: vLLM's ``EngineCoreOutput`` of the step.
            running: ids of the requests that have not ended.
        """
        for output in outputs:
            details, records = self._kept.get(output.request_id, (0, []))
            if records:
                put_records(output, details, records)
                records.clear()
        for ended in self._kept.keys() - running:
            del self._kept[ended]
            self._follows.discard(ended)
