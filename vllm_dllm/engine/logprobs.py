"""Logprobs, for requests that ask for them.

A masked model's logprobs come from the step in which a position was decided, by default from the
raw logits (``logprobs_mode``). A uniform-noise model's logprobs come from the step that finished
the canvas, at that step's temperature, as in vLLM's own DiffusionGemma class (which also applies
filters before the temperature).

The final token of a position is known only after the decoding algorithm has run, when the rows of
scores have been freed. But only a few tokens are possible (see `Algorithm.step`), so rows are
summarized as they are read. Nothing waits for the device: vLLM gets the rows of whole canvases,
starting with the tokens that leave, and uses as many rows as there are tokens. ``--max-logprobs``
is limited at start-up, because there are tables for all slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.engine.contracts import Readings, StepOutcome, StepPlan
from vllm_dllm.engine.row_options import RowOptions, RowOptionState
from vllm_dllm.engine.slots import Phase, SlotState
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.ops.compiled import CompiledOnce
from vllm_dllm.ops.statistics.rows import OfRows
from vllm_dllm.vllm_seams.channels import Failure

# How many bytes of scores in float32 are summarized at a time. A small summary stays in a CPU's
# caches; each takes a GPU several kernels.
SUMMARY_BYTES_CPU = 64 << 20
SUMMARY_BYTES_GPU = 1 << 30


class LogprobReports:
    """A `StepObserver`: the logprobs of canvases that have not left yet."""

    def __init__(self, slots: SlotState, rows: RowOptionState, mode: str) -> None:
        self.slots = slots
        self.rows = rows
        self.reports_logits = mode in ("raw_logits", "processed_logits")
        # Whether logprobs come from the logits before biases and filters.
        self.of_raw_logits = not mode.startswith("processed")
        # [slots, L, W] and [slots, L]: ids, the chosen token's first, their scores, and its rank. W
        # grows with the requests that ask.
        shape, device = tuple(slots.tokens.shape), slots.device
        self.ids = torch.zeros((*shape, 1), dtype=torch.int32, device=device)
        self.scores = torch.zeros((*shape, 1), device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        # The summaries read in this step, until `observe`, and the slots of their canvases.
        self.pending: list[tuple[list[int], ScoreSummary]] = []
        # By slot, the ids whose logprobs a request asks for, int64.
        self._named: dict[int, torch.Tensor] = {}
        # By the number of candidates: `ranked` and `_keep_chosen`, compiled.
        self._compiled: dict[int, tuple[Callable[..., Any], ...]] = {}

    def compile(self) -> None:
        """Let functions be compiled at their next call, unless an algorithm asks for more ids."""
        candidates = 2 if self.slots.kind.mask_token is not None else 4
        self._compiled[candidates] = CompiledOnce(ranked), CompiledOnce(_keep_chosen)

    def _functions(self, candidates: torch.Tensor) -> tuple[Callable[..., Any], ...]:
        return self._compiled.get(candidates.shape[-1], (ranked, _keep_chosen))

    def enter(self, options: RowOptions) -> None:
        """Make room for the logprobs of a request."""
        width = 1 + self._most(options)
        self.ids, self.scores = padded(self.ids, width, 0), padded(self.scores, width, 0)

    def leave(self, slot: int) -> None:
        """Drop the logprobs of the request in ``slot``."""
        self._named.pop(slot, None)

    def asking(self, on_host: np.ndarray) -> list[tuple[int, int, RowOptions]]:
        """(index in the batch, slot, options) of the requests of a batch that ask for logprobs."""
        rows = np.flatnonzero(self.slots.reports[on_host]).tolist()
        return [(row, int(on_host[row]), self.rows.by_slot[int(on_host[row])]) for row in rows]

    def _most(self, options: RowOptions) -> int:
        """The number of logprobs a request gets per position, excluding the chosen token's."""
        if options.token_ids:
            return len(options.token_ids)
        return min(options.logprobs or 0, self.slots.kind.vocabulary)

    def capture(
        self,
        on_host: np.ndarray,
        scores_of: Callable[[int, slice], torch.Tensor] | None,
        candidates: torch.Tensor,
        summarized: Callable[[int | torch.Tensor, bool], ScoreSummary] | None = None,
    ) -> None:
        """Summarize the scores of requests that ask for logprobs.

        `on_host` are the slots of a part of the batch, int ``[n]``; `summarized` maps the arguments
        `asked` and `normalizes` of `ScoreSummary.from_scores` to a summary of all n canvases; the
        other arguments are those of `summarize`, which runs without it.
        """
        alike: dict[int, list[tuple[int, int]]] = {}
        asked: list[tuple[int | torch.Tensor, list[tuple[int, int]]]] = []
        for index, slot, options in self.asking(on_host):
            if options.token_ids:
                if slot not in self._named:
                    ids: np.ndarray = np.array(options.token_ids, dtype=np.int64)
                    self._named[slot] = to_device(ids, self.slots.device)
                asked.append((self._named[slot], [(index, slot)]))
            else:
                alike.setdefault(self._most(options), []).append((index, slot))
        row_bytes = 4 * self.slots.kind.vocabulary
        for what, canvases in (*asked, *alike.items()):
            indices, slots = map(list, zip(*canvases, strict=True))
            if summarized is not None:
                whole = summarized(what, not self.reports_logits)
                columns = self._rows(tuple(vars(whole).values()), indices)
                self.pending.append((slots, ScoreSummary(*columns)))
                continue
            assert scores_of is not None
            how = what, not self.reports_logits, self._functions(candidates)[0]
            summary = summarize(scores_of, candidates, indices, how, row_bytes)
            self.pending.append((slots, summary))

    def observe(self, plan: StepPlan, outcome: StepOutcome, readings: Readings) -> None:
        """Keep the logprobs of the positions that a step decided.

        A request ends with an error if its algorithm has chosen a token that is not among the
        candidates (see `Algorithm.step`), because that token's score is no longer available.
        """
        if not self.pending:
            return
        read, self.pending = self.pending, []
        row_of = {slot: row for row, slot in enumerate(plan.on_host.tolist())}
        rows = [row_of[slot] for slots, _ in read for slot in slots]
        tensors = *_decided(plan, outcome, readings), plan.slots
        tokens, decided, slots = self._rows(tensors, rows)
        width = self.ids.shape[2] - 1
        # The columns after a canvas' own are id 0 at -inf.
        whole = ScoreSummary.join(
            [
                replace(
                    part,
                    ids=padded(part.ids, width, 0),
                    scores=padded(part.scores, width, -torch.inf),
                )
                for _, part in read
            ]
        )
        keep = self._functions(whole.candidates)[1]
        of_candidates = whole.candidates, whole.candidate_scores, whole.candidate_ranks
        score = keep(self, slots, tokens, decided, of_candidates)
        new = (
            (self.ids, torch.cat([tokens[..., None].int(), whole.ids], -1)),
            (self.scores, torch.cat([score[..., None], whole.scores], -1)),
        )
        for table, values in new:
            kept = torch.where(decided[..., None], values, table.index_select(0, slots))
            table.index_copy_(0, slots, kept)

    def _rows(self, tensors: tuple[torch.Tensor, ...], rows: list[int]) -> tuple[torch.Tensor, ...]:
        if rows == list(range(len(tensors[0]))):
            return tensors
        index = to_device(np.array(rows, dtype=np.int64), self.slots.device)
        return tuple(tensor.index_select(0, index) for tensor in tensors)

    def leaving(
        self, slots: torch.Tensor, on_host: np.ndarray, first: torch.Tensor
    ) -> LogprobsTensors | None:
        """The logprobs of the tokens that leave now, in batch order; see `OptionalParts.reported`.

        Each request that asks has L rows, of which vLLM uses as many as tokens leave.
        """
        asking = [row for row in self.asking(on_host) if row[2].returns]
        if not asking:
            return None
        length = self.slots.length
        # A request that asks for fewer logprobs shows only its own columns.
        width = 1 + max(self._most(options) for _, _, options in asking)
        rows = [index for index, _, _ in asking]
        starts: np.ndarray = np.zeros(len(on_host), dtype=np.int64)
        starts[rows] = length * np.arange(len(rows))
        slots, first = self._rows((slots, first), rows)
        # Nothing can leave after the end of the canvas.
        position = (first[:, None] + self.slots.position).clamp_max(length - 1)
        tables = self.ids[..., :width], self.scores[..., :width], self.ranks
        read = [table[slots[:, None], position].flatten(0, 1) for table in tables]
        return LogprobsTensors(*read, cu_num_generated_tokens=starts.tolist())

    def copy(self, slot: int) -> LogprobsTensors:
        """Copy the logprobs of the request in ``slot``, which asks for some."""
        width = 1 + self._most(self.rows.by_slot[slot])
        tables = self.ids[slot, :, :width], self.scores[slot, :, :width], self.ranks[slot]
        return LogprobsTensors(*(table.clone() for table in tables))

    def restore(self, slot: int, copy: LogprobsTensors) -> None:
        """Restore the `copy` of a request to the ``slot`` that it has entered."""
        width = copy.logprobs.shape[1]
        self.ids[slot, :, :width].copy_(copy.logprob_token_ids)
        self.scores[slot, :, :width].copy_(copy.logprobs)
        self.ranks[slot].copy_(copy.selected_token_ranks)


def _decided(
    plan: StepPlan, outcome: StepOutcome, readings: Readings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of canvases, int64 ``[n, L]``, and where a pass has decided them, bool ``[n, L]``.

    A shifted model reports only canvases that are read, the first after a prompt. If a prompt ends
    with a block, the commit of that block decides the first token of the canvas to report.
    """
    tokens, decided = outcome.canvas.tokens, outcome.decided
    if plan.state.kind.shifted and readings.next_canvas is not None:
        first = (plan.status.phase == int(Phase.COMMIT))[:, None] & (plan.state.position == 0)
        tokens = torch.where(first, readings.next_canvas, tokens)
        decided = decided | first
    return tokens, decided


@dataclass
class ScoreSummary(OfRows):
    """The scores of rows that may be reported; the rows of canvases have the shape ``[m, L]``."""

    ids: torch.Tensor  # int32 [..., K], the likeliest tokens, or those that a request has named
    scores: torch.Tensor  # float32 [..., K], their scores
    candidates: torch.Tensor  # int64 [..., C], the tokens that a position may hold after the step
    candidate_scores: torch.Tensor  # float32 [..., C]
    # int32 [..., C], how many tokens of the row score at least as much as the candidate, itself
    # included. vLLM's kernel counts ties the same way.
    candidate_ranks: torch.Tensor

    @classmethod
    def from_scores(
        cls,
        scores: torch.Tensor,
        candidates: torch.Tensor,
        asked: int | torch.Tensor,
        normalizes: bool,
        ranked: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> ScoreSummary:
        """Summarize rows of scores, ``[rows, vocabulary]`` of any floating dtype.

        `asked` says how many of the likeliest tokens are reported, or the ids to report instead,
        int64 ``[K]``. With `normalizes`, log-probabilities are reported. As in vLLM, scores are
        compared before: subtracting the log-sum-exp rounds, which would make ties. `ranked`
        is the function, perhaps compiled.
        """
        rows = scores.float()
        if isinstance(asked, int):
            top, ids = rows.topk(asked, -1)
        else:
            ids = asked.expand(len(rows), -1)
            top = rows.gather(1, ids)
        own, ranks = ranked(rows, candidates)
        if normalizes:
            total = rows.logsumexp(-1, keepdim=True)
            top, own = top - total, own - total
        return cls(ids.int(), top, candidates, own, ranks)


def ranked(rows: torch.Tensor, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and the ranks of candidates, ``[rows, C]`` all."""
    own = rows.gather(1, candidates)
    # Handle one candidate at a time, because all of them together would take C times the memory.
    ranks = [(rows >= score).sum(1, dtype=torch.int32) for score in own.split(1, dim=1)]
    return own, torch.stack(ranks, 1)


def _keep_chosen(
    reports: LogprobReports,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    decided: torch.Tensor,
    of_candidates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Keep the ranks of the tokens of canvases (int64 ``[m, L]``) where they were decided.

    Returns the tokens' scores. `of_candidates` are the last three fields of `ScoreSummary`.
    """
    candidates, *columns = of_candidates
    equal = candidates == tokens[..., None]
    which = equal.int().argmax(-1, keepdim=True)
    score, rank = (column.gather(-1, which)[..., 0] for column in columns)
    kept = torch.where(decided, rank, reports.ranks.index_select(0, slots))
    reports.ranks.index_copy_(0, slots, kept)
    reports.slots.fail(slots, (decided & ~equal.any(-1)).any(1), Failure.UNREAD_TOKEN)
    return score


def summarize(
    scores_of: Callable[[int, slice], torch.Tensor],
    candidates: torch.Tensor,
    indices: Sequence[int],
    how: tuple[Any, ...],
    row_bytes: int,
) -> ScoreSummary:
    """Summarize canvases that ask for the same, several at a time or a few rows at a time.

    Args:
        scores_of: maps a canvas' index in the batch and a slice of positions to their scores
            ``[rows, vocabulary]``, which may be computed on demand and are not kept.
        candidates: int64 ``[n, L, C]``, the tokens that canvases may hold after the step.
        indices: the m canvases to summarize, to ``[m, L]`` rows.
        how: the last arguments of `ScoreSummary.from_scores`.
        row_bytes: size of a row in float32.
    """
    most = SUMMARY_BYTES_CPU if candidates.device.type == "cpu" else SUMMARY_BYTES_GPU
    length, rows_at_once = candidates.shape[1], max(1, most // row_bytes)
    at_once, parts = max(1, rows_at_once // length), []
    for first in range(0, len(indices), at_once):
        some = indices[first : first + at_once]
        for begin in range(0, length, rows_at_once):
            rows = slice(begin, min(begin + rows_at_once, length))
            scores = torch.cat([scores_of(index, rows) for index in some])
            own = torch.cat([candidates[index, rows] for index in some])
            parts.append(ScoreSummary.from_scores(scores, own, *how))
    shape = len(indices), length
    columns = vars(ScoreSummary.join(parts)).values()
    return ScoreSummary(*(column.unflatten(0, shape) for column in columns))


def padded(table: torch.Tensor, width: int, value: float) -> torch.Tensor:
    """Pad the table ``[..., columns]`` with this value to `width` columns."""
    missing = width - table.shape[-1]
    return table if missing <= 0 else torch.nn.functional.pad(table, (0, missing), value=value)
