"""The worker's part of tracing: a record of each pass over the canvases of requests that ask.

Records are rows behind those of logprobs, see `tracing.records`. A batch without such a request
costs one look at a list on the host.

The logprob of a decided token is the logarithm of the probability that the decoding algorithm has
read anyway, or follows from it: `need_rows` says where it does not. Only there whole rows of logits
are read as for a request that asks for logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.decoding.base import BaseAlgorithm
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.settings.resolution import Choice
from vllm_dllm.tracing.records import ABSENT, FLAGS, GIVEN, UNDECIDED, Flag
from vllm_dllm.worker.logprobs import LogprobReports
from vllm_dllm.worker.readout.contract import Readings
from vllm_dllm.worker.row_options import RowOptions
from vllm_dllm.worker.score_summary import padded
from vllm_dllm.worker.slots import CanvasKind, SlotState
from vllm_dllm.worker.step_plan import StepOutcome, StepPlan
from vllm_dllm.worker.to_device import to_device

# From a tensor ``[n, ...]`` of a batch to the rows of its recorded canvases, ``[m, ...]``.
Selection = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PendingRecords:
    """Records of a step.

    Attributes:
        on_host: the slots of the recorded canvases, in batch order.
        ids: int32 ``[m, 1 + L]``, a header and the positions, see `tracing.records`.
        scores: float32 ``[m, 1 + L]``.
        bits: int32 ``[m, 1 + L]``; the header's lacks the index in the batch.
    """

    on_host: np.ndarray
    ids: torch.Tensor
    scores: torch.Tensor
    bits: torch.Tensor


def need_rows(
    choice: Choice,
    kind: CanvasKind,
    temperature: float,
    read_only: bool,
    rows: RowOptions | None,
    raw: bool,
) -> bool:
    """Whether the logprobs of a recorded request do not follow from what its algorithm reads.

    A masked model's logprobs are by default those of the raw logits. They follow from the
    probability of the likeliest token and the weight of the drawn one (`Readings.logprob`), unless
    logits were biased. A model of uniform noise divides by the temperature, of which 0 leaves
    nothing to read; see `token_choice`.

    Args:
        choice: of the request; its algorithm may choose ids that it has asked for.
        kind: of the model's canvases.
        temperature: of the request.
        read_only: the first canvas is the whole answer.
        rows: of the request.
        raw: a masked model's logprobs are those of the raw logits.
    """
    algorithm: Any = type(choice.algorithm)
    if algorithm.ask is not BaseAlgorithm.ask or not choice.is_ours:
        return True
    draws = temperature > 0
    if kind.mask_token is None:
        return rows is not None or not draws or read_only
    if rows is not None and (rows.biases or rows.returns):
        return True
    return draws and not raw


class StepRecords:
    """Records the passes of a step, between the update of its canvases and its output.

    Attributes:
        due: a request of the batch is recorded; the sampler sets it.
        pending: what was recorded in this step, until `added_to`.
    """

    def __init__(self, slots: SlotState, reports: LogprobReports) -> None:
        self.slots = slots
        self.reports = reports
        self.due = False
        self.pending: PendingRecords | None = None

    def note(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        decided: torch.Tensor,
        readings: Readings,
    ) -> None:
        """Record this pass, behind `LogprobReports.report` and before slots are written.

        Args:
            plan: of the step.
            outcome: of the step.
            decided: bool ``[n, L]``, see `CanvasUpdate.decided`.
            readings: what the decoding algorithm read.
        """
        request, state = plan.request, self.slots
        recorded = state.records[request.on_host]
        if not recorded.any():
            return
        index = None if recorded.all() else to_device(np.flatnonzero(recorded), state.device)

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if index is None else tensor.index_select(0, index)

        commits, on_host = rows(outcome.commits), request.on_host[recorded]
        tokens = torch.where(
            commits[:, None], rows(plan.before.tokens), rows(outcome.canvas.tokens)
        )
        denoised = ~rows(outcome.skips_denoise)
        read = _read(readings, rows, tokens)
        chosen = rows(decided) & denoised[:, None]
        if read.by_model is not None:
            chosen = chosen & read.by_model
        probability = torch.where(chosen, read.probability, UNDECIDED)
        probability = probability.masked_fill(rows(plan.before.fixed), GIVEN)
        if not isinstance(request.width, int):
            tokens = tokens.masked_fill(state.position >= rows(request.width)[:, None], ABSENT)
        header = (
            denoised * int(Flag.DENOISED)
            + commits * int(Flag.COMMITTED)
            + rows(outcome.leaves) * int(Flag.LEFT)
        )
        self.pending = PendingRecords(
            on_host,
            _with_header(state.start.index_select(0, rows(request.slots)), tokens, torch.int32),
            _with_header(
                rows(plan.standing.step), self._logprobs(on_host, read.logprob), torch.float32
            ),
            _with_header(header, probability.view(torch.int32), torch.int32),
        )

    def _logprobs(self, on_host: np.ndarray, read: torch.Tensor) -> torch.Tensor:
        """Logprobs of the tokens that this pass decided, float32 ``[m, L]``.

        Args:
            on_host: the slots of the recorded canvases, ``[m]``.
            read: those that follow from what the decoding algorithm read, ``[m, L]``.
        """
        from_rows = self.slots.records_rows[on_host]
        if not from_rows.any():
            return read
        # The table has no column while all who ask have theirs on the host.
        table_rows = self.reports.scores[to_device(on_host, self.slots.device)]
        scores = padded(table_rows, 1, 0)[..., 0]
        for index, slot in enumerate(on_host.tolist()):
            table = self.reports.on_host.get(slot)
            if table is not None:
                scores[index] = table.logprobs[:, 0].to(scores.device)
        return torch.where(to_device(from_rows, scores.device)[:, None], scores, read)

    def added_to(
        self, logprobs: LogprobsTensors | None, batch_on_host: np.ndarray
    ) -> LogprobsTensors:
        """The logprobs of a step, and behind them its `pending` records.

        Args:
            logprobs: as `LogprobReports.collect` returns them.
            batch_on_host: the slots of the batch.
        """
        pending, self.pending = self.pending, None
        assert pending is not None
        recorded: np.ndarray = np.zeros(len(self.slots.tokens), dtype=bool)
        recorded[pending.on_host] = True
        index = np.flatnonzero(recorded[batch_on_host])
        bits = pending.bits
        bits[:, 0] += to_device(index.astype(np.int32) * FLAGS, bits.device)
        starts, own = [0] * len(batch_on_host), 0
        if logprobs is not None:
            starts = list(logprobs.cu_num_generated_tokens or starts)
            own = len(logprobs.logprob_token_ids)
        return _joined(logprobs, pending, bits, [*starts[: len(batch_on_host)], own])


def _joined(
    logprobs: LogprobsTensors | None,
    pending: PendingRecords,
    bits: torch.Tensor,
    starts: list[int],
) -> LogprobsTensors:
    ids, scores = pending.ids.flatten()[:, None], pending.scores.flatten()[:, None]
    if logprobs is None:
        return LogprobsTensors(ids, scores, bits.flatten(), starts)
    device, width = logprobs.logprobs.device, logprobs.logprobs.shape[1]
    return LogprobsTensors(
        torch.cat([logprobs.logprob_token_ids, padded(ids.to(device), width, 0)]),
        torch.cat([logprobs.logprobs, padded(scores.to(device), width, 0)]),
        torch.cat([logprobs.selected_token_ranks, bits.flatten().to(device)]),
        starts,
    )


class _Read(NamedTuple):
    """What the decoding algorithm has read of the tokens on canvases, ``[m, L]``.

    Attributes:
        probability: float32.
        logprob: float32.
        by_model: bool, the model has chosen them; None where it has chosen all of them.
    """

    probability: torch.Tensor
    logprob: torch.Tensor
    by_model: torch.Tensor | None = None


def _read(readings: Readings, rows: Selection, tokens: torch.Tensor) -> _Read:
    """What was read of the recorded canvases, which `rows` selects; `tokens` is what they hold.

    A model of uniform noise writes a token at every position in every step. Where it is neither
    the likeliest one nor the one that was drawn, it is noise.
    """
    statistics = readings.statistics
    probability = rows(statistics.probability).float()
    if not isinstance(statistics, SampledStatistics):
        known = readings.logprob
        return _Read(probability, probability.log() if known is None else rows(known))
    is_likeliest = tokens == rows(statistics.token)
    probability = torch.where(is_likeliest, probability, rows(statistics.sample_probability))
    by_model = is_likeliest | (tokens == rows(statistics.sample))
    return _Read(probability, probability.log(), by_model)


def _with_header(header: torch.Tensor, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([header[:, None].to(dtype), body.to(dtype)], 1)
