"""From logits over a vocabulary to weights of classes: all that dynamic programming reads of them.

A class has up to the whole vocabulary and most have a few tokens, so tokens are laid out by class
in chunks of equal size: a reduction of each chunk, which is where the work is, and then a small
one from chunks to classes. Tokens of no class are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.ops.noise.keyed import gumbel
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX

CHUNK = 64
# Bytes of gathered logits that are held at once.
BYTES = 32 << 20
NOT_A_CHUNK = 1 << 40


@dataclass(frozen=True)
class TokenChunks:
    """The tokens of each class, in chunks. ``T`` chunks of ``CHUNK``; ``C`` classes.

    Attributes:
        token: int64 ``[T * CHUNK]``, ascending within a class; a class' last token fills its last
            chunk up.
        real: bool ``[T * CHUNK]``, false for what only fills up.
        filling: float32 ``[T]``, how much of a chunk only fills it up.
        chunk_class: int64 ``[T]``, ascending.
        class_of_token: int64 ``[ids]``, C for none.
        classes: C.
    """

    token: torch.Tensor
    real: torch.Tensor
    filling: torch.Tensor
    chunk_class: torch.Tensor
    class_of_token: torch.Tensor
    classes: int

    @classmethod
    def of(cls, class_of_token: torch.Tensor, classes: int) -> TokenChunks:
        """From the class of each token, int64 ``[ids]``, at least `classes` for none."""
        order = class_of_token.argsort(stable=True)
        order = order[: int((class_of_token < classes).sum())]
        kinds = class_of_token[order]
        size = torch.bincount(kinds, minlength=classes)
        chunks = (size + CHUNK - 1).div(CHUNK, rounding_mode="floor")
        chunk_class = torch.arange(classes, device=order.device).repeat_interleave(chunks)
        before = chunks.cumsum(0) - chunks
        within = torch.arange(len(chunk_class), device=order.device) - before[chunk_class]
        at = within[:, None] * CHUNK + torch.arange(CHUNK, device=order.device)
        most = size[chunk_class][:, None]
        first = (size.cumsum(0) - size)[chunk_class][:, None]
        token = order[(first + torch.minimum(at, most - 1)).flatten()]
        real = at < most
        filling = (~real).sum(1).float()
        return cls(token, real.flatten(), filling, chunk_class, class_of_token, classes)

    def some(self, first: int, end: int) -> TokenChunks:
        """The same for the ids ``first..end`` of a tile of the vocabulary, counted from 0 there."""
        return TokenChunks.of(self.class_of_token[first:end], self.classes)

    @property
    def rows_at_once(self) -> int:
        """Rows whose logits may be gathered together."""
        return max(1, BYTES // (4 * max(1, len(self.token))))


def class_best(logits: torch.Tensor, chunks: TokenChunks) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each class, and its token.

    Args:
        logits: ``[rows, ids]``, any floating dtype.
        chunks: the classes of these ids.

    Returns:
        Float32 ``[rows, C]`` and int64 ``[rows, C]``; ties go to the lowest id. A class without a
        token among these ids has -inf and token 0.
    """
    if not len(chunks.token):
        nothing = torch.full((len(logits), chunks.classes), -torch.inf, device=logits.device)
        return nothing, torch.zeros_like(nothing, dtype=torch.int64)
    parts = [_class_best(rows, chunks) for rows in logits.split(chunks.rows_at_once)]
    weight, token = zip(*parts, strict=True)
    return torch.cat(weight), torch.cat(token)


def _class_best(logits: torch.Tensor, chunks: TokenChunks) -> tuple[torch.Tensor, torch.Tensor]:
    rows, kinds = len(logits), chunks.chunk_class.expand(len(logits), -1)
    top = logits.index_select(1, chunks.token).view(rows, -1, CHUNK).amax(-1).float()  # [rows, T]
    top = top.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    best = top.new_full((rows, chunks.classes), -torch.inf)
    best.scatter_reduce_(1, kinds, top, "amax")
    # The first chunk that has the class' maximum has its lowest token.
    number = torch.arange(len(chunks.chunk_class), device=logits.device)
    wins = torch.where(top == best.gather(1, kinds), number, NOT_A_CHUNK)
    first = wins.new_full((rows, chunks.classes), NOT_A_CHUNK)
    first.scatter_reduce_(1, kinds, wins, "amin")
    known = first < NOT_A_CHUNK
    tokens = chunks.token.view(-1, CHUNK)[torch.where(known, first, 0)]  # [rows, C, CHUNK]
    at = logits.gather(1, tokens.flatten(1)).view(tokens.shape).argmax(-1, keepdim=True)
    return best, torch.where(known, tokens.gather(2, at)[..., 0], 0)


def class_sum(logits: torch.Tensor, chunks: TokenChunks) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the sum of exponentials of each class, and of each chunk.

    Arguments as in `class_best`.

    Returns:
        Float32 ``[rows, C]``, -inf for a class without tokens, and ``[rows, T]`` for
        `draw_in_class`.
    """
    parts = [_class_sum(rows, chunks) for rows in logits.split(chunks.rows_at_once)]
    whole, by_chunk = zip(*parts, strict=True)
    return torch.cat(whole), torch.cat(by_chunk)


def _class_sum(logits: torch.Tensor, chunks: TokenChunks) -> tuple[torch.Tensor, torch.Tensor]:
    rows, kinds = len(logits), chunks.chunk_class.expand(len(logits), -1)
    gathered = logits.index_select(1, chunks.token).float().view(rows, -1, CHUNK)
    top = gathered.amax(-1)  # [rows, T]
    # A chunk that is all -inf has no origin.
    origin = torch.where(top == -torch.inf, 0.0, top)
    share = gathered.sub_(origin[..., None]).exp_()
    # The last token was taken for what fills up, too: at most 63 times more than it is worth.
    mass = share.sum(-1) - share[..., -1] * chunks.filling
    by_chunk = mass.log() + origin
    best = top.new_full((rows, chunks.classes), -torch.inf)
    best.scatter_reduce_(1, kinds, top, "amax")
    best = torch.where(best == -torch.inf, 0.0, best)
    total = torch.zeros_like(best).scatter_add_(1, kinds, (by_chunk - best.gather(1, kinds)).exp())
    return total.log() + best, by_chunk


class RunningClasses:
    """`class_best` and `class_sum` of logits that come a tile of the vocabulary at a time."""

    def __init__(self, rows: int, chunks: TokenChunks) -> None:
        self.chunks = chunks
        device, shape = chunks.token.device, (rows, chunks.classes)
        self.weight = torch.full(shape, -torch.inf, device=device)
        self.token = torch.zeros(shape, dtype=torch.int64, device=device)
        self.sum = torch.full(shape, -torch.inf, device=device)

    def add(self, logits: torch.Tensor, first: int, tile: TokenChunks | None = None) -> None:
        """Fold in the logits ``[rows, n]`` of the ids from ``first`` on, in ascending order.

        `tile` is ``chunks.some(first, first + n)``, for callers that keep it.
        """
        tile = tile or self.chunks.some(first, first + logits.shape[1])
        weight, token = class_best(logits, tile)
        better = weight > self.weight
        self.token = torch.where(better, token + first, self.token)
        self.weight = torch.where(better, weight, self.weight)
        self.sum = torch.logaddexp(self.sum, class_sum(logits, tile)[0])


def draw_in_class(
    scaled: torch.Tensor,
    chunks: TokenChunks,
    by_chunk: torch.Tensor,
    kind: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """A token of a given class in each row, drawn from the softmax of the class.

    As `sampled_stats.draw` does, in two stages: a chunk of the class, then a token of the chunk.

    Args:
        scaled: ``[rows, ids]``, logits over the temperature.
        chunks: the classes of these ids.
        by_chunk: float32 ``[rows, T]``, from `class_sum` of the same logits.
        kind: int64 ``[rows]``, a class; for C (none) the result means nothing.
        keys: int64 ``[rows]``, see `noise.row_keys`.

    Returns:
        int64 ``[rows]``. Where the whole class is -inf, any of its tokens.
    """
    number = torch.arange(len(chunks.chunk_class), device=keys.device)
    score = _possible(by_chunk, chunks.chunk_class == kind[:, None])
    chunk = (score + gumbel(keys, FIRST_GROUP_INDEX + number)).argmax(-1)  # [rows]
    token = chunks.token.view(-1, CHUNK)[chunk]  # [rows, CHUNK]
    held = _possible(scaled.gather(1, token).float(), chunks.real.view(-1, CHUNK)[chunk])
    at = (held + gumbel(keys, token)).argmax(-1, keepdim=True)
    return token.gather(1, at)[:, 0]


def _possible(score: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """Scores of members, -inf for others; where all members are -inf, each is as good."""
    score = score.nan_to_num(-torch.inf, torch.inf, -torch.inf).masked_fill(~member, -torch.inf)
    none = score.amax(-1, keepdim=True) == -torch.inf
    return torch.where(none & member, 0.0, score)
