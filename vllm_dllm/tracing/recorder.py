"""The scheduler's part of tracing: it keeps a request's records until tokens of it leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.outputs import LogprobsLists

from vllm_dllm.settings.request import Asked
from vllm_dllm.tracing.records import Rows


class Label(NamedTuple):
    """What travels with the records of an output.

    Attributes:
        asked: what the request asks for.
        length: L.
        clocks: see `records.records`.
    """

    asked: Asked
    length: int
    clocks: list[int]


# A record that waits for tokens of its request to leave: its clock, see `Record`; all records of
# its step, int32 [3, m, 1 + L], which are the columns of `Rows` (scores as float32 bits); its row.
_Kept = tuple[tuple[int, int], np.ndarray, int]


class Recorder:
    """The records of all running requests that ask for them.

    Attributes:
        length: L.
        asked: returns what the request with a given id asks for; `Asked.NOTHING` if it has ended.
    """

    def __init__(self, length: int, asked: Callable[[str], Asked]) -> None:
        self.length = length
        self.asked = asked
        self._kept: dict[str, tuple[Asked, list[_Kept]]] = {}
        self._began = time.monotonic()
        self._steps = 0

    def note(self, request_ids: list[str], logprobs: LogprobsLists | None) -> None:
        """Keep the records of a step.

        Args:
            request_ids: the ids of the step's batch, in its order.
            logprobs: the step's logprobs. If they include records, ``cu_num_generated_tokens`` has
                more entries than there are requests: where the records begin, and the indices in
                the batch of the requests that they belong to.
        """
        self._steps += 1
        starts = None if logprobs is None else logprobs.cu_num_generated_tokens
        if logprobs is None or starts is None or len(starts) <= len(request_ids):
            return
        first_row, *batch_indices = starts[len(request_ids) :]
        ids, scores, bits = (column[first_row:] for column in logprobs[:3])
        sent = np.concatenate((ids[:, 0], scores[:, 0].view(np.int32), bits)).reshape(3, -1)
        headers, bodies = sent[:, : len(batch_indices)], sent[:, len(batch_indices) :]
        whole = (headers[:, :, None], bodies.reshape(3, -1, self.length))
        columns = np.concatenate(whole, 2)  # [3, records, 1 + L]
        clock = (self._steps, int(1000 * (time.monotonic() - self._began)))
        for row, index in enumerate(batch_indices):
            request_id = request_ids[index]
            kept = self._kept.get(request_id)
            # Requests with records are known already; `attach` removes those that have ended.
            if kept is None:
                asked = self.asked(request_id)
                if not asked:
                    continue
                kept = self._kept[request_id] = (asked, [])
            kept[1].append((clock, columns, row))

    def attach(self, outputs: Iterable[Any], running: Collection[str]) -> None:
        """Send the kept records of requests with the tokens that leave now.

        Args:
            outputs: vLLM's ``EngineCoreOutput`` of the step.
            running: ids of the requests that have not ended.
        """
        if not self._kept:
            return
        for output in outputs:
            asked, kept = self._kept.pop(output.request_id, (Asked.NOTHING, []))
            if kept:
                own = [columns[:, row] for _, columns, row in kept]
                ids, scores, bits = np.concatenate(own, 1)
                clocks = [number for clock, _, _ in kept for number in clock]
                output.new_logprobs = with_records(
                    output.new_logprobs,
                    Rows(ids, scores.view(np.float32), bits),
                    Label(asked, self.length, clocks),
                )
        for ended in self._kept.keys() - running:
            del self._kept[ended]


def with_records(logprobs: LogprobsLists | None, rows: Rows, label: Label) -> LogprobsLists:
    """Append records to the logprobs of a request's output.

    Args:
        logprobs: the logprobs of the tokens that leave now, or None.
        rows: the rows of the records.
        label: what the reader that takes the records off needs to know.
    """
    user = 0 if logprobs is None else len(logprobs.logprob_token_ids)
    marks = [user, int(label.asked), label.length, *label.clocks]
    if logprobs is None:
        return LogprobsLists(rows.ids[:, None], rows.scores[:, None], rows.bits, marks)
    shape = (len(rows.ids), logprobs.logprob_token_ids.shape[1])
    ids, scores = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    ids[:, 0], scores[:, 0] = rows.ids, rows.scores
    return LogprobsLists(
        np.concatenate([logprobs.logprob_token_ids.astype(np.int32), ids]),
        np.concatenate([logprobs.logprobs, scores]),
        np.concatenate([logprobs.sampled_token_ranks.astype(np.int32), rows.bits]),
        marks,
    )


def taken_off(logprobs: LogprobsLists) -> tuple[LogprobsLists | None, Rows, Label]:
    """What `with_records` was given; the logprobs are None if there were none.

    Logprobs without rows also become None, which makes no difference to a request that outputs
    nothing.
    """
    assert logprobs.cu_num_generated_tokens is not None
    user, asked, length, *clocks = logprobs.cu_num_generated_tokens
    rows = Rows(
        logprobs.logprob_token_ids[user:, 0],
        logprobs.logprobs[user:, 0],
        logprobs.sampled_token_ranks[user:],
    )
    own = LogprobsLists(*(column[:user] for column in logprobs[:3])) if user else None
    return own, rows, Label(Asked(asked), length, clocks)


def is_labelled(logprobs: LogprobsLists | None) -> bool:
    """Whether records follow a request's logprobs."""
    return logprobs is not None and logprobs.cu_num_generated_tokens is not None
