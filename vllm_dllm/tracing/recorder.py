"""The scheduler's part of tracing: it keeps a request's records until tokens of it leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm_dllm.settings.resolution import Asked
from vllm_dllm.vllm_seams.channels import PassFlags, Record, StepRecords, put_records


class Recorder:
    """The records of all running requests that ask for them.

    Attributes:
        asked: returns what the request with a given id asks for; `Asked.NOTHING` if it has ended.
    """

    def __init__(self, asked: Callable[[str], Asked]) -> None:
        self.asked = asked
        self._kept: dict[str, tuple[Asked, list[Record]]] = {}

    def note(self, clock: tuple[int, int], request_ids: list[str], records: StepRecords) -> None:
        """Keep the records of a step.

        Args:
            clock: `Record.engine_step` and `Record.milliseconds`.
            request_ids: the ids of the step's batch, in its order.
            records: the records, in numpy arrays.
        """
        for row, index in enumerate(records.request_indices):
            request_id = request_ids[index]
            # Requests with records are known already; `attach` removes those that have ended.
            kept = self._kept.get(request_id)
            if kept is None:
                asked = self.asked(request_id)
                if not asked:
                    continue
                kept = self._kept[request_id] = (asked, [])
            start, step, flags = records.headers[:, row].tolist()
            arrays = (records.tokens[row], *records.scores[:, row])
            kept[1].append(Record(*clock, start, step, PassFlags(flags), *arrays))

    def attach(self, outputs: Iterable[Any], running: Collection[str]) -> None:
        """Send the kept records of requests with the tokens that leave now.

        Args:
            outputs: vLLM's ``EngineCoreOutput`` of the step.
            running: ids of the requests that have not ended.
        """
        for output in outputs:
            if output.request_id in self._kept:
                put_records(output, *self._kept.pop(output.request_id))
        for ended in self._kept.keys() - running:
            del self._kept[ended]
