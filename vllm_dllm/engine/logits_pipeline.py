"""The steps applied to whole rows of logits, in order: bias, filter, draw, constrain, report.

Batches in which no request needs whole rows skip this module. How tokens are chosen from biased
rows differs between the two kinds of model, see `token_choice`; everything else is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.engine.logit_biases import LogitBiases
from vllm_dllm.engine.logprobs import LogprobReports
from vllm_dllm.engine.readout.contract import ReadRequest
from vllm_dllm.engine.row_options import RowWork
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.engine.token_choice import Followed, RowChoice, TokenChoice
from vllm_dllm.ops.statistics.rows import SampledStatistics

if TYPE_CHECKING:
    from vllm_dllm.constraints.grammar import ConstrainedPath


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
        noise: torch.Tensor | None = None,
    ) -> RowChoice:
        """Choose the tokens of ``n`` canvases.

        Args:
            logits: ``[n * L, vocabulary]``, overwritten with the biased logits.
            request: the request for these canvases.
            keys: int64 ``[n, L]``, the keys of the random numbers; None where no request draws.
            path: the paths of these canvases, written in place where a canvas is constrained; None
                where none is.
            noise: int64 ``[n, L]``, random tokens that an algorithm of uniform noise may choose.

        Returns:
            What was chosen, ``[n * L]`` rows.
        """
        if request.adjust is not None:
            ids, amount = (part.reshape(-1, 1) for part in request.adjust)
            logits.scatter_add_(1, ids, amount.to(logits.dtype))
        raw = self._raw_rows(logits, request.on_host)
        self.biases.apply(logits, request)
        chosen = self.choice.choose(logits, request, keys)
        if path is not None:
            self._constrain(chosen, request, path)
        if self.reports.asking(request.on_host):
            candidates = self._candidates(chosen, request, noise)

            def scores_of(index: int, positions: slice) -> torch.Tensor:
                rows = raw.get(index)
                return chosen.reported(index, positions) if rows is None else rows[positions]

            self.reports.capture(request.on_host, scores_of, candidates)
        return chosen

    @property
    def _reports_raw(self) -> bool:
        return self.choice.reports_raw and self.reports.of_raw_logits

    def copies_rows(self, on_host: np.ndarray) -> bool:
        """Whether logits of this batch (slots int ``[n]``) are copied before they are biased."""
        asking = self.reports.asking(on_host) if self._reports_raw else []
        return any(bool(options.work & RowWork.BIASES) for _, _, options in asking)

    def _raw_rows(self, logits: torch.Tensor, on_host: np.ndarray) -> dict[int, torch.Tensor]:
        """Raw logits ``[L, vocabulary]`` to report, by index in the batch; biased ones as copies.

        It is only known which tokens to report when biases have been applied.
        """
        if not self._reports_raw:
            return {}
        canvases = logits.unflatten(0, (-1, self.slots.length))
        return {
            index: canvases[index].clone() if options.work & RowWork.BIASES else canvases[index]
            for index, _, options in self.reports.asking(on_host)
        }

    def _candidates(
        self, chosen: RowChoice, request: ReadRequest, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens that the canvases may hold after the step, int64 ``[n, L, C]``.

        `Algorithm.step` has the list. Tokens of paths are among the chosen ones.
        """
        statistics, length = chosen.statistics, self.slots.length
        # A tokenizer's id may be one that the head does not have, but only in a prompt.
        held = self.slots.tokens.index_select(0, request.slots)
        parts = [statistics.token.view(-1, length), held.clamp_max(self.slots.kind.vocabulary - 1)]
        if isinstance(statistics, SampledStatistics):
            parts.append(statistics.sample.view(-1, length))
        if noise is not None:
            parts.append(noise)
        candidates = torch.stack(parts, -1)
        return candidates if request.ask is None else torch.cat([candidates, request.ask], -1)

    def _constrain(self, chosen: RowChoice, request: ReadRequest, path: ConstrainedPath) -> None:
        """Replace the chosen tokens of constrained canvases by those of the paths."""
        constraints, on_host, window = self.slots.constraints, request.on_host, request.window
        assert window is not None
        constrained, samples = constraints.constrained(on_host), self.slots.samples[on_host]
        for draws in (False, True):
            where = np.flatnonzero(constrained & (samples == draws))
            if len(where):
                index = to_device(where, self.slots.device)
                own = Followed(constraints.of(on_host[where]), window.take(index), index, where)
                path.put(index, chosen.follow(own, draws))
