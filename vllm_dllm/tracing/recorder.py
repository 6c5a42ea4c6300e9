"""The scheduler's part of tracing: it keeps the records of a request until tokens of it leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.outputs import LogprobsLists

from vllm_dllm.settings.request import Asked
from vllm_dllm.tracing.records import Rows


class Label(NamedTuple):
    """What travels beside the records of an output.

    Attributes:
        asked: what the request asks for.
        length: L.
        clocks: see `records.records`.
    """

    asked: Asked
    length: int
    clocks: list[int]


# A record that waits for tokens of its request to leave: its clock, see `Record`; all records of
# its step, int32 [3, m, 1 + L], the columns of `Rows` (of scores the bits of float32); its row.
_Kept = tuple[tuple[int, int], np.ndarray, int]


class Recorder:
    """The records of all running requests that ask for them.

    Attributes:
        length: L.
        asked: returns what the request with an id asks for, `Asked.NOTHING` where it has ended.
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
            request_ids: of the step's batch, in its order.
            logprobs: of the step. Where it has records, its ``cu_num_generated_tokens`` has more
                entries than there are requests: where they begin, and whose they are, as indices
                in the batch.
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
            # Who has records already is known; `attach` removes those that have ended.
            if kept is None:
                asked = self.asked(request_id)
                if not asked:
                    continue
                kept = self._kept[request_id] = (asked, [])
            kept[1].append((clock, columns, row))

    def attach(self, outputs: Iterable[Any], running: Collection[str]) -> None:
        """Send what is kept of requests with the tokens that leave now.

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
    """Records behind the logprobs of a request's output.

    Args:
        logprobs: of the tokens that leave now, or None.
        rows: of the records.
        label: what whoever takes the records off needs to know.
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
    """What `with_records` was given; the logprobs are None where there were none.

    No rows of logprobs are taken for none, which makes no difference to a request that outputs
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
    """Whether a request's logprobs have records behind them."""
    return logprobs is not None and logprobs.cu_num_generated_tokens is not None
