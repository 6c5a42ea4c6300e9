"""The steps applied to whole rows of logits, in order: bias, filter, draw, constrain, report.

Batches in which no request needs whole rows skip this module. How tokens are chosen from biased
rows differs between the two kinds of model, see `token_choice`; everything else is the same.
"""

from __future__ import annotations

import torch

from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath
from vllm_dllm.worker.logit_biases import LogitBiases
from vllm_dllm.worker.logprobs import LogprobReports
from vllm_dllm.worker.readout.contract import ReadRequest
from vllm_dllm.worker.slots import SlotState
from vllm_dllm.worker.token_choice import RowChoice, TokenChoice


class LogitsPipeline:
    """The one place where whole rows of logits are changed, chosen from and reported."""

    def __init__(
        self, slots: SlotState, vocabulary: int, choice: TokenChoice, reports: LogprobReports
    ) -> None:
        self.slots = slots
        self.choice = choice
        self.reports = reports
        self.biases = LogitBiases(slots, vocabulary)

    def read(
        self,
        logits: torch.Tensor,
        request: ReadRequest,
        keys: torch.Tensor | None,
        path: ConstrainedPath | None,
    ) -> RowChoice:
        """Choose the tokens of ``n`` canvases.

        Args:
            logits: ``[n * L, vocabulary]``, overwritten with the biased logits.
            request: the request for these canvases.
            keys: int64 ``[n, L]``, the keys of the random numbers; None where no request draws.
            path: the paths of these canvases, written in place where a canvas is constrained; None
                where none is.

        Returns:
            What was chosen, ``[n * L]`` rows.
        """
        if request.adjust is not None:
            ids, amount = (part.reshape(-1, 1) for part in request.adjust)
            logits.scatter_add_(1, ids, amount.to(logits.dtype))
        raw = self.choice.reports_raw and self.reports.of_raw_logits
        if raw:
            self.reports.capture(request.on_host, lambda _, rows: logits[rows].clone())
        self.biases.apply(logits, request)
        chosen = self.choice.choose(logits, request, keys)
        if path is not None:
            self._constrain(chosen, request, path)
        if not raw:
            self.reports.capture(request.on_host, chosen.reported)
        return chosen

    def _constrain(self, chosen: RowChoice, request: ReadRequest, path: ConstrainedPath) -> None:
        """Replace the chosen tokens of constrained canvases by those of the paths."""
        constraints, on_host, window = self.slots.constraints, request.on_host, request.window
        assert window is not None
        for follower, draws, index in constraints.groups(on_host, self.slots.samples[on_host]):
            path.put(index, chosen.follow(follower, window.take(index), draws, index))
