"""The scheduler's part of tracing: it keeps a request's records until tokens of it leave."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from vllm_dllm.vllm_seams.channels import PassFlags
from vllm_dllm.vllm_seams.channels.records import Record, put_records, take_step_records


class Recorder:
    """The records of all running requests whose steps somebody wants to know."""

    def __init__(self) -> None:
        # By request id: its `StepDetails` and its records.
        self._kept: dict[str, tuple[int, list[Record]]] = {}
        self._steps = 0
        self._began = time.monotonic()

    def begin(self, request_id: str, details: int) -> None:
        """Keep the records of a request from now on; `details` are its `StepDetails`."""
        self._kept[request_id] = details, []

    def note(self, output: Any) -> None:
        """Take the records of a step off vLLM's ``ModelRunnerOutput``, and keep them."""
        self._steps += 1
        records = take_step_records(output)
        if records is None:
            return
        milliseconds = int(1000 * (time.monotonic() - self._began))
        for row, index in enumerate(records.request_indices):
            kept = self._kept.get(output.req_ids[index])
            if kept is None:  # it has ended
                continue
            start, step, flags = records.headers[:, row].tolist()
            arrays = (records.tokens[row], *records.scores[:, row])
            record = Record(self._steps, milliseconds, start, step, PassFlags(flags), *arrays)
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
