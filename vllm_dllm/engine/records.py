"""A record of each pass over the canvases of requests that ask for a trace.

Records travel with the step's logprobs; see `vllm_seams.channels.records`.

The logprob of a decided token usually follows from the probability that the decoding algorithm
reads anyway; `PassRecorder._needs_no_rows` says when. Otherwise whole rows of logits are read, as
for a request that asks for logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.decoding.base import Algorithm
from vllm_dllm.engine.contracts import Readings, StepOutcome, StepPlan
from vllm_dllm.engine.row_options import RowOptions, RowWork
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.settings.resolution import ResolvedDecoding, ResolvedRequest
from vllm_dllm.vllm_seams.channels.records import (
    ABSENT,
    GIVEN,
    UNDECIDED,
    StepRecords,
    TracedLogprobs,
)

if TYPE_CHECKING:
    from vllm_dllm.engine.optional_parts import OptionalParts


class PassRecorder:
    """A `StepObserver`: records the passes of a step."""

    def __init__(self, slots: SlotState, parts: OptionalParts) -> None:
        self.slots = slots
        self.parts = parts
        # What was recorded in this step; until `added_to`, slots stand for indices in the batch.
        self.pending: StepRecords | None = None

    def row_options(
        self,
        params: Any,
        resolved: ResolvedRequest,
        choice: ResolvedDecoding,
        prompt_length: int,
        is_constrained: bool,
    ) -> RowOptions | None:
        """The row options of a recorded request, those that its records need among them."""
        rows = RowOptions.from_params(params, prompt_length, resolved.constrained)
        if not is_constrained and self._needs_no_rows(choice, params, resolved, rows):
            return rows
        return RowOptions.from_params(params, prompt_length, resolved.constrained, records=True)

    def _needs_no_rows(
        self,
        choice: ResolvedDecoding,
        params: Any,
        resolved: ResolvedRequest,
        rows: RowOptions | None,
    ) -> bool:
        """Whether a request's logprobs follow from what its algorithm reads, without whole rows.

        A masked model's logprobs come from the raw logits by default. They follow from the
        probability of the likeliest token and the weight of the drawn one (`Readings.logprob`),
        unless logits were biased, or the algorithm may choose ids that it has asked for. A
        uniform-noise model divides by the temperature, and a temperature of 0 leaves nothing to
        read; see `token_choice`.
        """
        algorithm: Any = type(choice.algorithm)
        asks, logprobs = algorithm.ask is not Algorithm.ask, self.parts.logprobs
        if asks or not choice.is_ours or logprobs.reports_logits:
            return False
        draws = params.temperature > 0
        if self.slots.kind.mask_token is None:
            return rows is None and draws and not resolved.read_only
        if rows is not None and (rows.work & RowWork.BIASES or rows.returns):
            return False
        return logprobs.of_raw_logits or not draws

    def observe(self, plan: StepPlan, outcome: StepOutcome, readings: Readings) -> None:
        """Record this pass, after `LogprobReports.observe`."""
        state = self.slots
        recorded = state.records[plan.on_host]
        index = None if recorded.all() else to_device(np.flatnonzero(recorded), state.device)

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if index is None else tensor.index_select(0, index)

        tokens = rows(outcome.shown)
        probability, logprob, by_model = _read(readings, rows, tokens)
        chosen = rows(outcome.decided)
        if by_model is not None:
            chosen = chosen & by_model
        probability = torch.where(chosen, probability, UNDECIDED)
        probability = probability.masked_fill(rows(plan.status.canvas.fixed), GIVEN)
        if not isinstance(plan.width, int):
            tokens = tokens.masked_fill(state.position >= rows(plan.width)[:, None], ABSENT)
        on_host = plan.on_host[recorded]
        logprobs = self._logprobs(on_host, logprob)
        headers = (plan.status.start, plan.status.step, outcome.flags)
        self.pending = StepRecords(
            on_host.tolist(),
            torch.stack([rows(header) for header in headers]).int(),
            tokens.int(),
            torch.stack((logprobs, probability)),
        )

    def _logprobs(self, on_host: np.ndarray, read: torch.Tensor) -> torch.Tensor:
        """Logprobs of the tokens that this pass decided: from rows of logits, or those `read`."""
        from_rows = self.parts.rows.records[on_host]
        if not from_rows.any():
            return read
        scores = self.parts.logprobs.scores[to_device(on_host, self.slots.device), :, 0]
        return torch.where(to_device(from_rows, scores.device)[:, None], scores, read)

    def added_to(
        self, logprobs: LogprobsTensors | None, on_host: np.ndarray
    ) -> LogprobsTensors | TracedLogprobs | None:
        """The logprobs of a batch, together with the `pending` records."""
        pending, self.pending = self.pending, None
        if pending is None:
            return logprobs
        recorded = set(pending.request_indices)
        pending.request_indices = [i for i, s in enumerate(on_host.tolist()) if s in recorded]
        return TracedLogprobs(logprobs, pending)


def _read(
    readings: Readings, rows: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return what was read about the `tokens` (int64 ``[m, L]``) on the recorded canvases.

    These are probabilities and logprobs, float32 ``[m, L]``, and whether the model chose the tokens
    (bool ``[m, L]``), or None if it chose all of them. In a uniform-noise model, a token that is
    neither the likeliest nor the drawn one is noise.
    """
    statistics = readings.statistics
    probability = rows(statistics.probability).float()
    if not isinstance(statistics, SampledStatistics):
        known = readings.logprob
        return probability, probability.log() if known is None else rows(known), None
    is_likeliest = tokens == rows(statistics.token)
    probability = torch.where(is_likeliest, probability, rows(statistics.sample_probability))
    by_model = is_likeliest | (tokens == rows(statistics.sample))
    return probability, probability.log(), by_model
