"""The scheduler's part of tracing: it keeps the records of a request until tokens of it leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
from vllm.v1.outputs import LogprobsLists

from vllm_dllm.settings.request import Asked
from vllm_dllm.tracing.records import Rows, batch_indices, clock


class Recorder:
    """The records of all running requests that ask for them.

    Attributes:
        length: L.
        asked: returns what the request with an id asks for, `Asked.NOTHING` where it has ended.
    """

    def __init__(self, length: int, asked: Callable[[str], Asked]) -> None:
        self.length = length
        self.asked = asked
        # By request: the clock of each step, the records of the step, and which of them is its own.
        self._kept: dict[str, tuple[Asked, list[tuple[Rows, Rows, int]]]] = {}
        self._began = time.monotonic()
        self._steps = 0

    def note(self, request_ids: list[str], logprobs: LogprobsLists | None) -> None:
        """Keep the records of a step.

        Args:
            request_ids: of the step's batch, in its order.
            logprobs: of the step. Where it has records, its ``cu_num_generated_tokens`` has one
                entry more than there are requests: where they begin.
        """
        self._steps += 1
        starts = None if logprobs is None else logprobs.cu_num_generated_tokens
        if logprobs is None or starts is None or len(starts) <= len(request_ids):
            return
        now = clock(self._steps, int(1000 * (time.monotonic() - self._began)))
        first_row, each = starts[len(request_ids)], self.length + 1
        rows = Rows(
            logprobs.logprob_token_ids[first_row:, 0].reshape(-1, each),
            logprobs.logprobs[first_row:, 0].reshape(-1, each),
            logprobs.sampled_token_ranks[first_row:].reshape(-1, each),
        )
        for row, index in enumerate(batch_indices(rows).tolist()):
            request_id = request_ids[index]
            kept = self._kept.get(request_id)
            # Who has records already is known; `attach` removes those that have ended.
            if kept is None:
                asked = self.asked(request_id)
                if not asked:
                    continue
                kept = self._kept[request_id] = (asked, [])
            kept[1].append((now, rows, row))

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
                label = (int(asked), self.length)
                parts = [part for now, rows, row in kept for part in (now, rows.part(row))]
                output.new_logprobs = with_records(output.new_logprobs, Rows.join(parts), label)
        for ended in self._kept.keys() - running:
            del self._kept[ended]


def with_records(
    logprobs: LogprobsLists | None, rows: Rows, label: tuple[int, int]
) -> LogprobsLists:
    """Records behind the logprobs of a request's output.

    Args:
        logprobs: of the tokens that leave now, or None.
        rows: of the records.
        label: two numbers for who takes the records off.
    """
    user = 0 if logprobs is None else len(logprobs.logprob_token_ids)
    width = 1 if logprobs is None else logprobs.logprob_token_ids.shape[1]
    ids = np.zeros((len(rows.ids), width), np.int32)
    scores = np.zeros((len(rows.ids), width), np.float32)
    ids[:, 0], scores[:, 0] = rows.ids, rows.scores
    bits = rows.bits
    if logprobs is not None:
        ids = np.concatenate([logprobs.logprob_token_ids.astype(np.int32), ids])
        scores = np.concatenate([logprobs.logprobs, scores])
        bits = np.concatenate([logprobs.sampled_token_ranks.astype(np.int32), bits])
    return LogprobsLists(ids, scores, bits, [user, *label])


def taken_off(logprobs: LogprobsLists) -> tuple[LogprobsLists | None, Rows, tuple[int, int]]:
    """What `with_records` was given; the logprobs are None where there were none.

    No rows of logprobs are taken for none, which makes no difference to a request that outputs
    nothing.
    """
    assert logprobs.cu_num_generated_tokens is not None
    user, *label = logprobs.cu_num_generated_tokens
    rows = Rows(
        logprobs.logprob_token_ids[user:, 0],
        logprobs.logprobs[user:, 0],
        logprobs.sampled_token_ranks[user:],
    )
    own = LogprobsLists(*(column[:user] for column in logprobs[:3])) if user else None
    return own, rows, (label[0], label[1])


def is_labelled(logprobs: LogprobsLists | None) -> bool:
    """Whether a request's logprobs have records behind them."""
    return logprobs is not None and logprobs.cu_num_generated_tokens is not None
