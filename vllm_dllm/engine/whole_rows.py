"""Requests that need whole rows of logits: filters (top-k, top-p, an allowed set) and logprobs.

Their canvases, and theirs alone, take a second, materialised pass over the head behind the tiled
one of the whole batch. A batch without such a request pays nothing; one with them pays a loop
over them and, for logprobs, a copy to the host when a canvas leaves.

Meanings are those of vLLM's own DiffusionGemma class: filters apply before the temperature,
logprobs are those of the step in which the canvas was finished, at that step's temperature (at
temperature 1 for a read-only canvas, and for a greedy request).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_dllm.engine.requests import Phase, SlotState
from vllm_dllm.ops.sampled_stats import FIELDS, SampledStatistics, sampled_statistics
from vllm_dllm.ops.tiled_stats import Head


@dataclass(frozen=True)
class RowNeeds:
    """Why a request needs whole rows.

    Attributes:
        top_k: keep this many tokens; 0 keeps all.
        top_p: keep the likeliest tokens up to this probability; 1 keeps all.
        logprobs: how many of the likeliest tokens to report, beside the chosen; None for no
            report, -1 for the whole vocabulary.
        token_ids: report these instead.
        constrained: only `token_ids` may be chosen.
    """

    top_k: int
    top_p: float
    logprobs: int | None
    token_ids: tuple[int, ...]
    constrained: bool

    @classmethod
    def of(cls, params: Any, constrained: bool) -> RowNeeds | None:
        """A request's needs, or None where the tiled pass is enough."""
        needs = cls(
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            logprobs=params.logprobs,
            token_ids=tuple(params.logprob_token_ids or ()),
            constrained=constrained,
        )
        return None if needs == cls(0, 1.0, None, (), False) else needs

    @property
    def reports(self) -> bool:
        """Whether logprobs leave with the tokens."""
        return self.logprobs is not None or bool(self.token_ids)


class WholeRows:
    """What such requests need, by slot (on the host), and the logprobs of unfinished canvases."""

    def __init__(self, slots: SlotState, head: Head, raw: bool) -> None:
        self.slots = slots
        self.head = head
        self.raw = raw  # report logits rather than logprobs
        self.needs: dict[int, RowNeeds] = {}
        self.kept: dict[int, LogprobsTensors] = {}

    def enter(self, slot: int, needs: RowNeeds | None) -> None:
        """A request enters ``slot``; whatever was there before is gone."""
        self.kept.pop(slot, None)
        self.needs.pop(slot, None)
        if needs is not None:
            self.needs[slot] = needs

    def refine(
        self,
        statistics: SampledStatistics,
        soft: torch.Tensor,
        hidden: torch.Tensor,
        draws: tuple[torch.Tensor, torch.Tensor],
        slots: np.ndarray,
    ) -> None:
        """Replace what the tiled pass found for canvases that need whole rows, in place.

        Args:
            statistics: ``[n, L]``.
            soft: ``[n, L, hidden]``.
            hidden: ``[n * L, hidden]``.
            draws: temperature ``[n]`` and keys ``[n, L]`` of this step.
            slots: int ``[n]``, on the host.
        """
        length = self.slots.length
        for index, slot in enumerate(slots.tolist()):
            needs = self.needs.get(slot)
            if needs is None:
                continue
            rows = hidden[index * length : (index + 1) * length]
            logits = self._filtered(self.head.whole(rows), needs)
            temperature, keys = draws[0][index].expand(length), draws[1][index]
            found, distribution = sampled_statistics(logits, temperature, keys)
            for name in FIELDS:
                getattr(statistics, name)[index] = getattr(found, name)
            if self.head.embedding is not None:
                soft[index] = self.head.average(distribution)
            if needs.reports and int(self.slots.phase[slot]) != Phase.COMMIT:
                plain = bool(self.slots.read_only[slot]) or float(temperature[0]) == 0
                scaled = logits if plain else logits / temperature[:, None]
                self.kept[slot] = self._report(scaled, found.token, needs)

    def collect(self, slots: np.ndarray, num_sampled: torch.Tensor) -> LogprobsTensors | None:
        """The logprobs of the canvases that leave now, in batch order; None if none has any."""
        if not any(slot in self.kept for slot in slots.tolist()):
            return None
        parts: list[LogprobsTensors] = []
        starts, rows = [], 0
        for slot, count in zip(slots.tolist(), num_sampled.tolist(), strict=True):
            starts.append(rows)
            if count and slot in self.kept:
                parts.append(self.kept.pop(slot))
                parts[-1] = _first(parts[-1], count)
                rows += count
        return _joined(parts, starts) if parts else None

    def _filtered(self, logits: torch.Tensor, needs: RowNeeds) -> torch.Tensor:
        rows = len(logits)
        if needs.constrained:
            allowed = torch.tensor(needs.token_ids, device=logits.device)
            outside = torch.full_like(logits, -torch.inf)
            logits = outside.index_copy_(1, allowed, logits[:, allowed])
        if needs.top_k == 0 and needs.top_p == 1:
            return logits
        k = torch.full((rows,), min(needs.top_k, logits.shape[1]), device=logits.device)
        p = torch.full((rows,), needs.top_p, device=logits.device)
        return apply_top_k_top_p(logits, k if needs.top_k else None, p if needs.top_p < 1 else None)

    def _report(
        self, logits: torch.Tensor, chosen: torch.Tensor, needs: RowNeeds
    ) -> LogprobsTensors:
        scores = logits.float() if self.raw else logits.float().log_softmax(-1)
        if needs.token_ids:
            ids = torch.tensor(needs.token_ids, device=logits.device).expand(len(logits), -1)
        else:
            most = self.head.vocabulary if needs.logprobs == -1 else needs.logprobs or 0
            ids = scores.topk(most, dim=-1).indices
        ids = torch.cat([chosen[:, None], ids], dim=1)
        selected = scores.gather(1, chosen[:, None])
        # Ranks count from 1 and ties count, as vLLM's kernel does.
        ranks = (scores >= selected).sum(1)
        return LogprobsTensors(ids, scores.gather(1, ids), ranks)


def _first(part: LogprobsTensors, count: int) -> LogprobsTensors:
    return LogprobsTensors(
        part.logprob_token_ids[:count], part.logprobs[:count], part.selected_token_ranks[:count]
    )


def _joined(parts: Sequence[LogprobsTensors], starts: list[int]) -> LogprobsTensors:
    """One table; narrow parts are padded with id 0 at -inf, which vLLM never shows."""
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
