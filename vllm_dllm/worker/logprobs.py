"""Logprobs of requests that ask for them.

The logprobs of a masked model are those of the step in which a position was decided, by default of
the raw logits (``logprobs_mode``). Those of a model of uniform noise belong to the step that
finished the canvas, at that step's temperature, as in vLLM's own DiffusionGemma class (which also
applies filters before the temperature). They cost a loop over the requests that ask for them, and a
copy to the host when a canvas leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.worker.row_options import RowOptions
from vllm_dllm.worker.slots import SlotState


class LogprobReports:
    """The scores of the current step, and the logprobs of canvases that have not left yet.

    Attributes:
        of_raw_logits: whether logprobs are those of the logits before biases and filters.
        scores: the scores of the current step by slot, float ``[L, vocabulary]`` each.
        kept: the logprobs of the positions decided so far by slot, L rows each.
    """

    def __init__(self, slots: SlotState, mode: str) -> None:
        self.slots = slots
        self.reports_logits = mode in ("raw_logits", "processed_logits")
        self.of_raw_logits = not mode.startswith("processed")
        self.scores: dict[int, torch.Tensor] = {}
        self.kept: dict[int, LogprobsTensors] = {}

    def forget(self, slot: int) -> None:
        """Drop what was kept for the last request in ``slot``, because a new one enters it."""
        self.kept.pop(slot, None)

    def capture(self, on_host: np.ndarray, scores_of: Callable[[int, slice], torch.Tensor]) -> None:
        """Keep the scores of requests that ask for logprobs until `report` is called.

        Args:
            on_host: the slots of a batch, int ``[n]``.
            scores_of: called with a canvas' index in the batch and the slice of its rows; returns
                the scores to keep, ``[L, vocabulary]``.
        """
        length = self.slots.length
        for index, slot, options in self.slots.with_row_options(on_host):
            if options.reports:
                rows = slice(index * length, (index + 1) * length)
                self.scores[slot] = scores_of(index, rows)

    def report(self, tokens: torch.Tensor, decided: torch.Tensor, on_host: np.ndarray) -> None:
        """Keep the logprobs of the positions that this step decided.

        Args:
            tokens: int64 ``[n, L]``, the updated canvases.
            decided: bool ``[n, L]``, positions whose token was chosen in this step.
            on_host: the slots of the batch, int ``[n]``.
        """
        for index, slot in enumerate(on_host.tolist()):
            if slot not in self.scores:
                continue
            new = self._logprobs(self.scores[slot], tokens[index], self.slots.row_options[slot])
            old = self.kept.get(slot, new)
            is_new = decided[index]
            self.kept[slot] = LogprobsTensors(
                torch.where(is_new[:, None], new.logprob_token_ids, old.logprob_token_ids),
                torch.where(is_new[:, None], new.logprobs, old.logprobs),
                torch.where(is_new, new.selected_token_ranks, old.selected_token_ranks),
            )
        self.scores.clear()

    def _logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, options: RowOptions
    ) -> LogprobsTensors:
        scores = logits.float()
        if not self.reports_logits:
            scores = scores.log_softmax(-1)
        if options.token_ids:
            ids = torch.tensor(options.token_ids, device=logits.device).expand(len(logits), -1)
        else:
            most = logits.shape[1] if options.logprobs == -1 else options.logprobs or 0
            ids = scores.topk(most, dim=-1).indices
        ids = torch.cat([chosen[:, None], ids], dim=1)
        selected = scores.gather(1, chosen[:, None])
        # Ranks begin at 1, and ties count as better, as in vLLM's kernel.
        ranks = (scores >= selected).sum(1)
        return LogprobsTensors(ids, scores.gather(1, ids), ranks)

    def collect(
        self, on_host: np.ndarray, num_sampled: torch.Tensor, first: torch.Tensor
    ) -> LogprobsTensors | None:
        """The logprobs of the tokens that leave now, in batch order; None if there are none.

        Args:
            on_host: the slots of the batch, int ``[n]``.
            num_sampled: int ``[n]``, number of tokens that leave of each canvas.
            first: int64 ``[n]``, where those tokens begin in their canvas.
        """
        if not any(slot in self.kept for slot in on_host.tolist()):
            return None
        parts: list[LogprobsTensors] = []
        starts, rows = [], 0
        counts = zip(on_host.tolist(), num_sampled.tolist(), first.tolist(), strict=True)
        for slot, count, begin in counts:
            starts.append(rows)
            if count and slot in self.kept:
                # It is kept until a new request enters the slot, because more of this canvas may
                # leave in later steps.
                parts.append(_part(self.kept[slot], begin, begin + count))
                rows += count
        return _joined(parts, starts) if parts else None


def _part(whole: LogprobsTensors, first: int, end: int) -> LogprobsTensors:
    return LogprobsTensors(
        whole.logprob_token_ids[first:end],
        whole.logprobs[first:end],
        whole.selected_token_ranks[first:end],
    )


def _joined(parts: Sequence[LogprobsTensors], starts: list[int]) -> LogprobsTensors:
    """Join parts to one table; narrow ones are padded with id 0 at -inf, which vLLM never shows."""
    widest = max(part.logprobs.shape[1] for part in parts)

    def padded(tensor: torch.Tensor, value: float) -> torch.Tensor:
        missing = widest - tensor.shape[1]
        return torch.nn.functional.pad(tensor, (0, missing), value=value)

    return LogprobsTensors(
        torch.cat([padded(part.logprob_token_ids, 0) for part in parts]),
        torch.cat([padded(part.logprobs, -torch.inf) for part in parts]),
        torch.cat([part.selected_token_ranks for part in parts]),
        cu_num_generated_tokens=starts,
    )
