"""The worker's part of tracing: a record of each pass over the canvases of requests that ask.

Records are rows behind those of logprobs, see `tracing.records`. A batch without such a request
costs one look at a list on the host.

The logprob of a decided token is the logarithm of the probability that the decoding algorithm has
read anyway, where the two are the same: `need_rows` says where they are not. Only there whole rows
of logits are read as for a request that asks for logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.decoding.base import BaseAlgorithm
from vllm_dllm.ops.statistics.rows import RowStatistics, SampledStatistics
from vllm_dllm.settings.resolution import Choice
from vllm_dllm.tracing.records import ABSENT, FLAGS, GIVEN, UNDECIDED, Flag
from vllm_dllm.worker.logprobs import LogprobReports
from vllm_dllm.worker.score_summary import padded
from vllm_dllm.worker.slots import CanvasKind, SlotState
from vllm_dllm.worker.step_plan import StepOutcome, StepPlan
from vllm_dllm.worker.to_device import to_device


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


def need_rows(choice: Choice, kind: CanvasKind, temperature: float, read_only: bool) -> bool:
    """Whether the logprobs of a recorded request are not those of what its algorithm reads.

    An algorithm reads the probability of the likeliest token, at the temperature where tokens are
    drawn. A masked model's logprobs are those of the raw logits. A model of uniform noise divides
    by the temperature, of which 0 leaves nothing to read; see `token_choice`.

    Args:
        choice: of the request; its algorithm may choose ids that it has asked for.
        kind: of the model's canvases.
        temperature: of the request.
        read_only: the first canvas is the whole answer.
    """
    algorithm: Any = type(choice.algorithm)
    if algorithm.ask is not BaseAlgorithm.ask or not choice.is_ours:
        return True
    draws = temperature > 0
    return draws if kind.mask_token is not None else not draws or read_only


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
        statistics: RowStatistics,
    ) -> None:
        """Record this pass, behind `LogprobReports.report` and before slots are written.

        Args:
            plan: of the step.
            outcome: of the step.
            decided: bool ``[n, L]``, see `CanvasUpdate.decided`.
            statistics: ``[n, L]``, what the decoding algorithm read.
        """
        request, state = plan.request, self.slots
        on_host = np.flatnonzero(state.records[request.on_host])
        if not len(on_host):
            return
        index = to_device(on_host, state.device)

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, index)

        commits = rows(outcome.commits)
        tokens = torch.where(
            commits[:, None], rows(plan.before.tokens), rows(outcome.canvas.tokens)
        )
        probability, by_model = _read(statistics, index, tokens)
        denoised = ~rows(outcome.skips_denoise)
        chosen = rows(decided) & by_model & denoised[:, None]
        logprobs = self._logprobs(request.on_host[on_host], probability.float().log())
        probability = torch.where(chosen, probability.float(), UNDECIDED)
        probability = probability.masked_fill(rows(plan.before.fixed), GIVEN)
        width = request.width if isinstance(request.width, int) else rows(request.width)[:, None]
        slots = rows(request.slots)
        header = (
            denoised * int(Flag.DENOISED)
            + commits * int(Flag.COMMITTED)
            + rows(outcome.leaves) * int(Flag.LEFT)
        )
        self.pending = PendingRecords(
            request.on_host[on_host],
            _with_header(
                state.start.index_select(0, slots),
                tokens.masked_fill(state.position >= width, ABSENT),
                torch.int32,
            ),
            _with_header(rows(plan.standing.step), logprobs, torch.float32),
            _with_header(header, probability.view(torch.int32), torch.int32),
        )

    def _logprobs(self, on_host: np.ndarray, read: torch.Tensor) -> torch.Tensor:
        """Logprobs of the tokens that this pass decided, float32 ``[m, L]``.

        Args:
            on_host: the slots of the recorded canvases, ``[m]``.
            read: those by the decoding algorithm, ``[m, L]``.
        """
        needs_rows = self.slots.needs_rows[on_host]
        if not needs_rows.any():
            return read
        # The table has no column while all who ask have theirs on the host.
        table_rows = self.reports.scores[to_device(on_host, self.slots.device)]
        scores = padded(table_rows, 1, 0)[..., 0]
        for index, slot in enumerate(on_host.tolist()):
            table = self.reports.on_host.get(slot)
            if table is not None:
                scores[index] = table.logprobs[:, 0].to(scores.device)
        return torch.where(to_device(needs_rows, scores.device)[:, None], scores, read)

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
        index = np.flatnonzero(np.isin(batch_on_host, pending.on_host))
        bits = pending.bits.clone()
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


def _read(
    statistics: RowStatistics, index: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities of the tokens on canvases, and whether the model has chosen them.

    A model of uniform noise writes a token at every position in every step. Where it is neither
    the likeliest one nor the one that was drawn, it is noise.

    Returns:
        Float32 and bool ``[m, L]``.
    """
    probability = statistics.probability.index_select(0, index)
    if not isinstance(statistics, SampledStatistics):
        return probability, torch.ones_like(tokens, dtype=torch.bool)
    is_drawn = tokens == statistics.sample.index_select(0, index)
    is_likeliest = tokens == statistics.token.index_select(0, index)
    drawn = statistics.sample_probability.index_select(0, index)
    return torch.where(is_likeliest, probability, drawn), is_drawn | is_likeliest


def _with_header(header: torch.Tensor, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([header[:, None].to(dtype), body.to(dtype)], 1)
