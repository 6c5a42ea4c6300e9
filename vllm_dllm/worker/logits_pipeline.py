"""Requests that need whole rows of logits: biases, filters and logprobs.

A batch without such a request pays nothing. Filters of a masked model (top-k, top-p, min-p) are
one operation on all rows that have one; biases and reports are a loop over the requests
that ask for them and, for logprobs, a copy to the host when a canvas leaves. A model of uniform
noise takes a second, materialised pass over the head for such canvases, and theirs alone.

Logprobs are those of the step in which a position was decided: for a masked model of the raw
logits (``logprobs_mode``), for one of uniform noise of the step that finished the canvas, at that
step's temperature, as in vLLM's own DiffusionGemma class (there filters also apply before the
temperature). Penalties count what stands before the canvas, so a canvas' positions do not depend
on the order in which they are decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_dllm.constraints.decoding.best_path import CanvasWindow
from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.sampled import SampledStatistics, sampled_statistics
from vllm_dllm.worker.constraint_state import on_path
from vllm_dllm.worker.row_needs import RowNeeds
from vllm_dllm.worker.slots import Mark, SlotState

NO_NEEDS = RowNeeds()
# The largest score, by the dtype of logits: one that a temperature, at least 0.01, leaves finite.
MOST_SCORE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}


class WholeRows:
    """What such requests need, by slot (on the host), and the logprobs of unfinished canvases.

    Attributes:
        history: int32 ``[slots, length]``, the tokens of each request; set by the sampler.
    """

    def __init__(
        self, slots: SlotState, vocabulary: int, mode: str, head: Head | None = None
    ) -> None:
        self.slots = slots
        self.vocabulary = vocabulary
        self.head = head
        self.logits_are_reported = mode in ("raw_logits", "processed_logits")
        self.processed = mode.startswith("processed")
        self.needs: dict[int, RowNeeds] = {}
        self.rows: dict[int, torch.Tensor] = {}  # this step's scores [L, vocabulary], by slot
        self.kept: dict[int, LogprobsTensors] = {}
        self.history: torch.Tensor = torch.zeros((0, 0), dtype=torch.int32)

    def enter(self, slot: int, needs: RowNeeds | None) -> None:
        """A request enters ``slot``; whatever was there before is gone."""
        self.kept.pop(slot, None)
        self.needs.pop(slot, None)
        if needs is not None:
            self.needs[slot] = needs

    def asked(self, on_host: np.ndarray) -> bool:
        """Whether a request of the batch needs whole rows."""
        return bool(self._asking(on_host))

    def _asking(
        self, on_host: np.ndarray, constrained: bool = False
    ) -> list[tuple[int, int, RowNeeds]]:
        """(index in the batch, slot, needs) of the requests of a batch that have some.

        With ``constrained`` also of those with a constraint.
        """
        if not self.needs and not constrained:
            return []
        follower, slots = self.slots.constraints.follower, enumerate(on_host.tolist())
        return [
            (n, slot, self.needs.get(slot, NO_NEEDS))
            for n, slot in slots
            if slot in self.needs or (constrained and follower(slot) is not None)
        ]

    def shape(self, logits: torch.Tensor, on_host: np.ndarray) -> None:
        """Apply biases and bans to logits ``[n * L, vocabulary]``, in place."""
        length = self.slots.length
        for index, slot, needs in self._asking(on_host):
            if needs.shapes:
                self._shape(logits[index * length : (index + 1) * length], slot, needs)

    def _shape(self, rows: torch.Tensor, slot: int, needs: RowNeeds) -> None:
        """The order is vLLM's: allowed ids, bias, minimum length, bans, penalties.

        Whatever numbers meet here, scores stay finite or become -inf, which rules a token out.
        """

        def ids(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=rows.device)

        scores = rows.float()
        if needs.allowed:
            allowed = ids(needs.allowed)
            scores = torch.full_like(scores, -torch.inf).index_copy_(1, allowed, scores[:, allowed])
        if needs.logit_bias:
            bias = torch.tensor(list(needs.logit_bias.values()), device=rows.device)
            scores = scores.index_add(1, ids(list(needs.logit_bias)), bias.expand(len(rows), -1))
        if needs.min_tokens and needs.ends:
            put_out = self.slots.start[slot] + self.slots.position - needs.prompt_length  # [L]
            too_early = (put_out < needs.min_tokens)[:, None]
            # A tokenizer may end with an id that the head does not have.
            ends = ids([end for end in needs.ends if end < self.vocabulary])
            masked = scores[:, ends].masked_fill(too_early, -torch.inf)
            scores = scores.index_copy(1, ends, masked)
        if needs.banned:
            scores = scores.index_fill(1, ids(needs.banned), -torch.inf)
        ruled_out = scores == -torch.inf
        if needs.penalises:
            scores = self._penalised(scores, slot, needs)
        most = MOST_SCORE[rows.dtype]
        rows.copy_(scores.clamp(-most, most).masked_fill(ruled_out, -torch.inf))
        nothing_left = ruled_out.all(1).any()
        failure = self.slots.failure
        failure[slot] = torch.where(nothing_left, int(Mark.NO_TOKEN_LEFT), failure[slot])

    def _penalised(self, scores: torch.Tensor, slot: int, needs: RowNeeds) -> torch.Tensor:
        """As vLLM's penalties, counting what stands before the canvas."""
        tokens = self.history[slot].long().clamp(0, self.vocabulary - 1)
        at = torch.arange(len(tokens), device=tokens.device)
        before = at < torch.clamp(self.slots.start[slot], min=needs.prompt_length)
        count = torch.zeros(self.vocabulary, device=scores.device)
        count.index_add_(0, tokens, (before & (at >= needs.prompt_length)).float())
        seen = torch.zeros(self.vocabulary, device=scores.device)
        seen.index_add_(0, tokens, before.float())
        repeated = torch.where(scores > 0, scores / needs.repetition, scores * needs.repetition)
        scores = torch.where(seen > 0, repeated, scores)
        return scores - (needs.frequency * count + needs.presence * (count > 0))

    def filter(self, scaled: torch.Tensor, on_host: np.ndarray) -> torch.Tensor:
        """Tempered logits ``[n * L, vocabulary]`` without the tokens that filters exclude."""
        asking = [(n, needs) for n, _, needs in self._asking(on_host) if needs.filters]
        if not asking:
            return scaled
        index = torch.tensor([n for n, _ in asking], device=scaled.device)
        rows = scaled.view(-1, self.slots.length, scaled.shape[1])
        some = self._filtered(rows[index].flatten(0, 1), [needs for _, needs in asking])
        return rows.index_copy(0, index, some.view(len(index), *rows.shape[1:])).flatten(0, 1)

    def _filtered(self, logits: torch.Tensor, needs: list[RowNeeds]) -> torch.Tensor:
        """Logits ``[n * L, vocabulary]`` of `n` requests, filtered; one operation for all."""
        device, length = logits.device, self.slots.length

        def each(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device).repeat_interleave(length)

        if any(need.min_p for need in needs):
            floor = logits.amax(-1) + each([max(need.min_p, 1e-30) for need in needs]).log()
            logits = logits.masked_fill(logits < floor[:, None], -torch.inf)
        k = p = None
        if any(need.top_k for need in needs):
            k = each([min(need.top_k or self.vocabulary, self.vocabulary) for need in needs])
        if any(need.top_p < 1 for need in needs):
            p = each([need.top_p for need in needs])
        return apply_top_k_top_p(logits.clone(), k, p)

    def refine(
        self,
        statistics: SampledStatistics,
        soft: torch.Tensor,
        hidden: torch.Tensor,
        draws: tuple[torch.Tensor, torch.Tensor],
        batch: tuple[np.ndarray, CanvasWindow | None],
    ) -> ConstrainedPath | None:
        """Replace what the tiled pass found for canvases that need whole rows, in place.

        Args:
            statistics: ``[n, L]``.
            soft: ``[n, L, hidden]``.
            hidden: ``[n * L, hidden]``.
            draws: temperature ``[n]`` and keys ``[n, L]`` of this step.
            batch: the slots, int ``[n]``, and what constraints see of their canvases.

        Returns:
            The constrained canvases' paths.
        """
        on_host, window = batch
        constraints = self.slots.constraints
        path = None if window is None else ConstrainedPath.empty(window)
        if self.head is None:
            raise TypeError("only a model with a tiled head refines")
        length = self.slots.length
        for index, slot, needs in self._asking(on_host, path is not None):
            logits = self.head.whole(hidden[index * length : (index + 1) * length])
            if needs.shapes:
                self._shape(logits, slot, needs)
            if needs.filters:
                logits = self._filtered(logits, [needs])
            temperature, keys = draws[0][index].expand(length), draws[1][index]
            found, distribution = sampled_statistics(logits, temperature, keys)
            follower = constraints.follower(slot)
            if follower is not None and window is not None and path is not None:
                at = torch.tensor([index], device=logits.device)
                drawn = (temperature, keys) if self.slots.samples[slot] else None
                found, chosen = on_path(
                    found, distribution, logits, drawn, (follower, window.take(at))
                )
                path.put(at, chosen)
            for f in fields(found):
                getattr(statistics, f.name)[index] = getattr(found, f.name)
            soft[index] = self.head.average(distribution)
            if needs.reports:
                plain = bool(self.slots.read_only[slot]) or float(temperature[0]) == 0
                self.rows[slot] = logits if plain else logits / temperature[:, None]
        return path

    def remember(self, logits: torch.Tensor, on_host: np.ndarray) -> None:
        """Keep the scores ``[n * L, vocabulary]`` of requests that report, for `report`."""
        length = self.slots.length
        for index, slot, needs in self._asking(on_host):
            if needs.reports:
                self.rows[slot] = logits[index * length : (index + 1) * length].clone()

    def report(self, tokens: torch.Tensor, decided: torch.Tensor, on_host: np.ndarray) -> None:
        """Note the logprobs of the positions that this step decided.

        `tokens` int64 ``[n, L]`` is what stands there now, `decided` bool ``[n, L]``.
        """
        for index, slot in enumerate(on_host.tolist()):
            if slot not in self.rows:
                continue
            new = self._scores(self.rows[slot], tokens[index], self.needs[slot])
            old = self.kept.get(slot, new)
            at = decided[index]
            self.kept[slot] = LogprobsTensors(
                torch.where(at[:, None], new.logprob_token_ids, old.logprob_token_ids),
                torch.where(at[:, None], new.logprobs, old.logprobs),
                torch.where(at, new.selected_token_ranks, old.selected_token_ranks),
            )
        self.rows.clear()

    def _scores(
        self, logits: torch.Tensor, chosen: torch.Tensor, needs: RowNeeds
    ) -> LogprobsTensors:
        scores = logits.float()
        if not self.logits_are_reported:
            scores = scores.log_softmax(-1)
        if needs.token_ids:
            ids = torch.tensor(needs.token_ids, device=logits.device).expand(len(logits), -1)
        else:
            most = self.vocabulary if needs.logprobs == -1 else needs.logprobs or 0
            ids = scores.topk(most, dim=-1).indices
        ids = torch.cat([chosen[:, None], ids], dim=1)
        selected = scores.gather(1, chosen[:, None])
        # Ranks count from 1 and ties count, as vLLM's kernel does.
        ranks = (scores >= selected).sum(1)
        return LogprobsTensors(ids, scores.gather(1, ids), ranks)

    def collect(
        self, on_host: np.ndarray, num_sampled: torch.Tensor, first: torch.Tensor
    ) -> LogprobsTensors | None:
        """The logprobs of the canvases that leave now, in batch order; None if none has any.

        `first` int64 is where each row's tokens begin in its canvas (the prompt's tail).
        """
        if not any(slot in self.kept for slot in on_host.tolist()):
            return None
        parts: list[LogprobsTensors] = []
        starts, rows = [], 0
        counts = zip(on_host.tolist(), num_sampled.tolist(), first.tolist(), strict=True)
        for slot, count, begin in counts:
            starts.append(rows)
            if count and slot in self.kept:
                # Kept until the slot has a new request: more of this canvas may follow.
                parts.append(_some(self.kept[slot], begin, begin + count))
                rows += count
        return _joined(parts, starts) if parts else None


def _some(part: LogprobsTensors, first: int, end: int) -> LogprobsTensors:
    return LogprobsTensors(
        part.logprob_token_ids[first:end],
        part.logprobs[first:end],
        part.selected_token_ranks[first:end],
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
