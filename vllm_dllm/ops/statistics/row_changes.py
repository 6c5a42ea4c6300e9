"""What the options of requests change in rows of logits, and the plain reference of the change.

Biases and penalties are float32 and change float32 numbers, as in vLLM: they may be smaller than
the last bit of a bfloat16 logit. `logits_triton` reads the same record beside bfloat16 logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# The largest score. It stays finite when divided by any temperature (at least 0.01).
MOST_SCORE = 1e30


@dataclass(frozen=True)
class RowChanges:
    """Changes in the rows of n canvases of L positions each."""

    # int32 [n, 4], where each canvas has its rows in `shift`, `ends` and `counts`, or -1 if it has
    # none; on the host, and the same on the device. A part of it is aligned to 16 bytes.
    on_host: torch.Tensor
    index: torch.Tensor
    shift: torch.Tensor  # float32 [a, vocabulary], what is added; -inf excludes an id
    ends: torch.Tensor  # bool [b, vocabulary], ids that are excluded at early positions
    early: torch.Tensor  # bool [b, L], these positions
    counts: torch.Tensor  # int32 [c, 2, vocabulary], how often an id was seen, and in the output
    penalties: torch.Tensor  # float32 [c, 3], for repetition, frequency and presence

    @classmethod
    def none(cls, canvases: int, device: torch.device) -> RowChanges:
        """No changes of this number of canvases."""
        index = torch.full((canvases, 4), -1, dtype=torch.int32)
        on_device = torch.full_like(index, -1, device=device)
        number, no = torch.zeros((1, 1), device=device), on_device[:1, :1] > 0
        return cls(index, on_device, number, no, no, on_device[:1], number)

    def part(self, canvases: slice) -> RowChanges:
        """The changes of some of the canvases."""
        return replace(self, on_host=self.on_host[canvases], index=self.index[canvases])

    def apply(self, scores: torch.Tensor) -> None:
        """Change float32 scores ``[n * L, vocabulary]`` in place: the reference.

        For any parameters, the results are finite, or -inf for excluded tokens.
        """
        canvases = scores.view(len(self.on_host), -1, scores.shape[1])
        changes = self.on_host >= 0
        # A GPU would wait for the choice of canvases, and changes all of them.
        where = None
        if scores.device.type == "cpu" and not changes.any(1).all():
            where = changes.any(1).nonzero()[:, 0]
        own = canvases if where is None else canvases.index_select(0, where)
        index = self.index if where is None else self.index.index_select(0, where)
        biased, delayed, penalised, _ = changes.any(0).tolist()
        if biased:
            shift = _rows(self.shift, index[:, 0])[:, None]
            own.add_(shift).masked_fill_(shift == -torch.inf, -torch.inf)
        if delayed:
            early, ends = _rows(self.early, index[:, 1]), _rows(self.ends, index[:, 1])
            own.masked_fill_(early[..., None] & ends[:, None], -torch.inf)
        ruled_out = own == -torch.inf
        if penalised:
            self._penalise(own, index[:, 2])
        own.clamp_(-MOST_SCORE, MOST_SCORE).masked_fill_(ruled_out, -torch.inf)
        if where is not None:
            canvases.index_copy_(0, where, own)

    def _penalise(self, scores: torch.Tensor, rows: torch.Tensor) -> None:
        """Apply vLLM's penalties to scores ``[m, L, vocabulary]``, by these rows of `counts`."""
        seen, count = _rows(self.counts, rows)[:, :, None].unbind(1)  # [m, 1, vocabulary]
        repetition, frequency, presence = _rows(self.penalties, rows).T[..., None, None]
        factor, positive = torch.where(seen > 0, repetition, 1.0), scores > 0
        # Keep only one large temporary alive at a time.
        scores.div_(torch.where(positive, factor, 1.0))
        scores.mul_(torch.where(positive, 1.0, factor))
        scores.sub_(frequency * count + presence * (count > 0))


def _rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows ``[m, ...]`` of a table by their index, int32 ``[m]``; zeros for -1."""
    found = table.index_select(0, index.clamp_min(0))
    return found.masked_fill_((index < 0).view(-1, *[1] * (found.ndim - 1)), 0)
