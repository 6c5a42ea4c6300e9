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
from vllm_dllm.engine.logprobs import LogprobReports
from vllm_dllm.engine.readout.contract import Readings
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.score_summary import padded
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.engine.step_plan import StepOutcome, StepPlan
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.settings.resolution import Choice
from vllm_dllm.tracing.records import ABSENT, GIVEN, UNDECIDED

# From a tensor ``[n, ...]`` of a batch to the rows of its recorded canvases, ``[m, ...]``.
Selection = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PendingRecords:
    """Records of a step.

    Attributes:
        on_host: the slots of the recorded canvases, in batch order.
        columns: int32 ``[3, m + m * L]``: ids, scores and bits of the headers, then those of the
            positions, see `tracing.records`; scores are the bits of float32.
    """

    on_host: np.ndarray
    columns: torch.Tensor


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
        index = None if recorded.all() else to_device(np.flatnonzero(recorded), state.device)

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if index is None else tensor.index_select(0, index)

        tokens = rows(outcome.shown)
        read = _read(readings, rows, tokens)
        chosen = rows(decided)
        if read.by_model is not None:
            chosen = chosen & read.by_model
        probability = torch.where(chosen, read.probability, UNDECIDED)
        probability = probability.masked_fill(rows(plan.before.fixed), GIVEN)
        if not isinstance(request.width, int):
            tokens = tokens.masked_fill(state.position >= rows(request.width)[:, None], ABSENT)
        start = state.start.index_select(0, request.slots)
        on_host = request.on_host[recorded]
        logprobs = self._logprobs(on_host, read.logprob)
        columns = (
            *(rows(start).int(), tokens.int().flatten()),
            *(rows(plan.standing.step), logprobs.view(torch.int32).flatten()),
            *(rows(outcome.told).int(), probability.view(torch.int32).flatten()),
        )
        self.pending = PendingRecords(on_host, torch.cat(columns).view(3, -1))

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
        recorded = set(pending.on_host.tolist())
        indices = [i for i, slot in enumerate(batch_on_host.tolist()) if slot in recorded]
        starts, own = [0] * len(batch_on_host), 0
        if logprobs is not None:
            starts = list(logprobs.cu_num_generated_tokens or starts)
            own = len(logprobs.logprob_token_ids)
        marks = [*starts[: len(batch_on_host)], own, *indices]
        return _joined(logprobs, pending.columns, marks)


def _joined(
    logprobs: LogprobsTensors | None, columns: torch.Tensor, marks: list[int]
) -> LogprobsTensors:
    """Logprobs, and behind them the rows of records, ``[3, rows]`` as in `PendingRecords`."""
    ids, scores, bits = columns.unbind()
    ids, scores = ids.unsqueeze(1), scores.view(torch.float32).unsqueeze(1)
    if logprobs is None:
        return LogprobsTensors(ids, scores, bits, marks)
    device, width = logprobs.logprobs.device, logprobs.logprobs.shape[1]
    return LogprobsTensors(
        torch.cat([logprobs.logprob_token_ids, padded(ids.to(device), width, 0)]),
        torch.cat([logprobs.logprobs, padded(scores.to(device), width, 0)]),
        torch.cat([logprobs.selected_token_ranks, bits.to(device)]),
        marks,
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
