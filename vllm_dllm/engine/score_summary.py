"""What is kept of the scores of a canvas, so that the rows themselves need not be kept.

Which token a position ends up with is known only after the decoding algorithm has run, long after
the rows of scores are gone. But only a few tokens are possible (see `Algorithm.step`), so the score
and the rank of each of them are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

# How many bytes of scores in float32 are summarized at a time.
SUMMARY_BYTES = 64 << 20


@dataclass(frozen=True)
class ScoreSummary:
    """The scores of the rows of a canvas that may be reported.

    Attributes:
        ids: int32 ``[L, K]``, the likeliest tokens, or those that a request has named.
        scores: float32 ``[L, K]``, their scores.
        candidates: int64 ``[L, C]``, the tokens that a position may hold after the step.
        candidate_scores: float32 ``[L, C]``.
        candidate_ranks: int32 ``[L, C]``, how many tokens of the row score at least as much as the
            candidate, itself included. vLLM's kernel counts ties the same way.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    candidates: torch.Tensor
    candidate_scores: torch.Tensor
    candidate_ranks: torch.Tensor

    @classmethod
    def of(
        cls,
        scores: torch.Tensor,
        candidates: torch.Tensor,
        asked: int | torch.Tensor,
        normalizes: bool,
    ) -> ScoreSummary:
        """Summarize rows of scores.

        Scores are compared before they are normalized, as vLLM does it: the difference to the
        log-sum-exp is rounded, which would make ties of different scores.

        Args:
            scores: ``[rows, vocabulary]``, any floating dtype.
            candidates: int64 ``[rows, C]``.
            asked: how many of the likeliest tokens are reported, at most the vocabulary; or the
                ids to report instead, int64 ``[K]``.
            normalizes: log-probabilities are reported, not the scores as they are.
        """
        rows = scores.float()
        if isinstance(asked, int):
            top, ids = rows.topk(asked, -1)
        else:
            ids = asked.expand(len(rows), -1)
            top = rows.gather(1, ids)
        own = rows.gather(1, candidates)
        # One candidate at a time, because all of them together would take C times the memory.
        ranks = [(rows >= score).sum(1, dtype=torch.int32) for score in own.split(1, dim=1)]
        if normalizes:
            total = rows.logsumexp(-1, keepdim=True)
            top, own = top - total, own - total
        return cls(ids.int(), top, candidates, own, torch.stack(ranks, 1))

    def move_report(self, device: torch.device) -> ScoreSummary:
        """The same with `ids` and `scores` on another device."""
        return replace(self, ids=self.ids.to(device), scores=self.scores.to(device))

    def chosen(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Score (float32), rank (int32) and whether it is a candidate (bool) of each token.

        The tensors have the shape of `tokens`, int64 ``[..., L]``; score and rank mean nothing
        where a token is no candidate.
        """
        equal = self.candidates == tokens[..., None]
        which = equal.int().argmax(-1, keepdim=True)
        score, rank = (
            self.candidate_scores.gather(-1, which),
            self.candidate_ranks.gather(-1, which),
        )
        return score[..., 0], rank[..., 0], equal.any(-1)


def summarize(
    scores_of: Callable[[slice], torch.Tensor],
    candidates: torch.Tensor,
    asked: int | torch.Tensor,
    normalizes: bool,
    row_bytes: int,
    device: torch.device,
) -> ScoreSummary:
    """Summarize the rows of a canvas, some at a time.

    Args:
        scores_of: from a slice of positions to their scores ``[rows, vocabulary]``, which may be
            computed on demand and are not kept.
        candidates: int64 ``[L, C]``.
        asked: as for `ScoreSummary.of`.
        normalizes: as for `ScoreSummary.of`.
        row_bytes: size of a row in float32.
        device: where the reported ids and scores go.
    """
    length, at_once = len(candidates), max(1, SUMMARY_BYTES // row_bytes)
    parts = []
    for first in range(0, length, at_once):
        rows = slice(first, min(first + at_once, length))
        part = ScoreSummary.of(scores_of(rows), candidates[rows], asked, normalizes)
        parts.append(part.move_report(device))
    return _combined(torch.cat, parts)


def summarize_canvases(
    scores_of: Callable[[int, slice], torch.Tensor],
    candidates: torch.Tensor,
    indices: Sequence[int],
    how: tuple[int, bool],
    row_bytes: int,
) -> list[ScoreSummary]:
    """Summarize canvases that ask for equally many tokens, several at a time where rows are short.

    Args:
        scores_of: as for `summarize`, with a canvas' index in the batch as its first argument.
        candidates: int64 ``[n, L, C]``, those of the batch.
        indices: the canvases to summarize.
        how: `asked` and `normalizes` of `ScoreSummary.of`.
        row_bytes: size of a row in float32.
    """
    length, (asked, normalizes) = candidates.shape[1], how
    at_once, found = SUMMARY_BYTES // (row_bytes * length), []
    if at_once < 2:
        device = candidates.device
        return [
            summarize(
                partial(scores_of, index), candidates[index], asked, normalizes, row_bytes, device
            )
            for index in indices
        ]
    for first in range(0, len(indices), at_once):
        some = indices[first : first + at_once]
        rows = torch.cat([scores_of(index, slice(0, length)) for index in some])
        of = torch.cat([candidates[index] for index in some])
        whole = ScoreSummary.of(rows, of, asked, normalizes)
        columns = [getattr(whole, f.name).split(length) for f in fields(ScoreSummary)]
        found += [ScoreSummary(*parts) for parts in zip(*columns, strict=True)]
    return found


def stacked(summaries: Sequence[ScoreSummary], width: int) -> ScoreSummary:
    """The summaries of canvases with a leading dimension, and `width` columns to report.

    The columns behind a canvas' own ones are id 0 at -inf.
    """
    parts = [
        replace(
            part,
            ids=padded(part.ids, width, 0),
            scores=padded(part.scores, width, -torch.inf),
        )
        for part in summaries
    ]
    return _combined(torch.stack, parts)


def _combined(
    combine: Callable[[list[torch.Tensor]], torch.Tensor], parts: Sequence[ScoreSummary]
) -> ScoreSummary:
    return ScoreSummary(
        *(combine([getattr(part, f.name) for part in parts]) for f in fields(ScoreSummary))
    )


def padded(table: torch.Tensor, width: int, value: float) -> torch.Tensor:
    """The table ``[..., columns]`` with further columns of this value, up to `width` columns."""
    missing = width - table.shape[-1]
    return table if missing <= 0 else torch.nn.functional.pad(table, (0, missing), value=value)
