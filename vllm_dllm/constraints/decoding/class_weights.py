"""From logits over a vocabulary to one weight for each token class, as dynamic programming needs.

A class may hold almost the whole vocabulary, but most hold a few tokens. So the tokens of each
class are laid out in chunks of equal size. A reduction over each chunk does most of the work, and a
small one then combines the chunks of each class. Tokens of no class are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.ops.noise.keyed import gumbel
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX

CHUNK = 64
# How many bytes of logits are gathered at once.
GATHERED_BYTES = 32 << 20
# Larger than the number of any chunk.
NOT_A_CHUNK = 1 << 40


@dataclass(frozen=True)
class TokenChunks:
    """The tokens of each of ``C`` classes, laid out in ``T`` chunks of ``CHUNK`` tokens.

    Attributes:
        token: int64 ``[T * CHUNK]``, ids, ascending within a class. The last chunk of a class is
            padded with copies of the class' last token.
        real: bool ``[T * CHUNK]``, false for padding.
        padding: float32 ``[T]``, number of padding entries in each chunk.
        chunk_class: int64 ``[T]``, the class of each chunk, ascending.
        classes: C.
    """

    token: torch.Tensor
    real: torch.Tensor
    padding: torch.Tensor
    chunk_class: torch.Tensor
    classes: int

    @classmethod
    def of(cls, class_of_token: torch.Tensor, classes: int) -> TokenChunks:
        """From the class of each token, int64 ``[ids]``; no class is any number >= `classes`."""
        order = class_of_token.argsort(stable=True)
        order = order[: int((class_of_token < classes).sum())]
        kinds = class_of_token[order]
        size = torch.bincount(kinds, minlength=classes)
        chunks = (size + CHUNK - 1).div(CHUNK, rounding_mode="floor")
        chunk_class = torch.arange(classes, device=order.device).repeat_interleave(chunks)
        first_chunk = chunks.cumsum(0) - chunks
        within = torch.arange(len(chunk_class), device=order.device) - first_chunk[chunk_class]
        index = within[:, None] * CHUNK + torch.arange(CHUNK, device=order.device)
        class_size = size[chunk_class][:, None]
        first = (size.cumsum(0) - size)[chunk_class][:, None]
        token = order[(first + torch.minimum(index, class_size - 1)).flatten()]
        real = index < class_size
        padding = (~real).sum(1).float()
        return cls(token, real.flatten(), padding, chunk_class, classes)

    @property
    def rows_at_once(self) -> int:
        """How many rows of logits may be gathered at once."""
        return max(1, GATHERED_BYTES // (4 * max(1, len(self.token))))


def class_maxima(logits: torch.Tensor, chunks: TokenChunks) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each class, and its token.

    Args:
        logits: ``[rows, ids]``, any floating dtype.
        chunks: the classes of these ids.

    Returns:
        The logit, float32 ``[rows, C]``, and the id, int64 ``[rows, C]``; ties go to the lowest id.
        A class without tokens has the logit -inf and the id 0.
    """
    if not len(chunks.token):
        nothing = torch.full((len(logits), chunks.classes), -torch.inf, device=logits.device)
        return nothing, torch.zeros_like(nothing, dtype=torch.int64)
    parts = [_class_maxima(rows, chunks) for rows in logits.split(chunks.rows_at_once)]
    weight, token = zip(*parts, strict=True)
    return torch.cat(weight), torch.cat(token)


def _class_maxima(logits: torch.Tensor, chunks: TokenChunks) -> tuple[torch.Tensor, torch.Tensor]:
    rows, kinds = len(logits), chunks.chunk_class.expand(len(logits), -1)
    top = logits.index_select(1, chunks.token).view(rows, -1, CHUNK).amax(-1).float()  # [rows, T]
    top = top.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    best = top.new_full((rows, chunks.classes), -torch.inf)
    best.scatter_reduce_(1, kinds, top, "amax")
    # The first chunk that attains the maximum of its class holds the lowest such token.
    number = torch.arange(len(chunks.chunk_class), device=logits.device)
    wins = torch.where(top == best.gather(1, kinds), number, NOT_A_CHUNK)
    first = wins.new_full((rows, chunks.classes), NOT_A_CHUNK)
    first.scatter_reduce_(1, kinds, wins, "amin")
    attained = first < NOT_A_CHUNK
    tokens = chunks.token.view(-1, CHUNK)[torch.where(attained, first, 0)]  # [rows, C, CHUNK]
    place = logits.gather(1, tokens.flatten(1)).view(tokens.shape).argmax(-1, keepdim=True)
    return best, torch.where(attained, tokens.gather(2, place)[..., 0], 0)


def class_logsumexp(logits: torch.Tensor, chunks: TokenChunks) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-sum-exp of the logits of each class, and of each chunk.

    The arguments are those of `class_maxima`.

    Returns:
        Float32 ``[rows, C]``, -inf for a class without tokens, and ``[rows, T]`` for
        `draw_in_class`.
    """
    parts = [_class_logsumexp(rows, chunks) for rows in logits.split(chunks.rows_at_once)]
    whole, by_chunk = zip(*parts, strict=True)
    return torch.cat(whole), torch.cat(by_chunk)


def _class_logsumexp(
    logits: torch.Tensor, chunks: TokenChunks
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, kinds = len(logits), chunks.chunk_class.expand(len(logits), -1)
    gathered = logits.index_select(1, chunks.token).float().view(rows, -1, CHUNK)
    top = gathered.amax(-1)  # [rows, T]
    # Subtracting -inf from a chunk that is all -inf would give NaN.
    origin = torch.where(top == -torch.inf, 0.0, top)
    share = gathered.sub_(origin[..., None]).exp_()
    # The sum counts the padding, which is at most 63 copies of the chunk's last token.
    mass = share.sum(-1) - share[..., -1] * chunks.padding
    by_chunk = mass.log() + origin
    best = top.new_full((rows, chunks.classes), -torch.inf)
    best.scatter_reduce_(1, kinds, top, "amax")
    best = torch.where(best == -torch.inf, 0.0, best)
    total = torch.zeros_like(best).scatter_add_(1, kinds, (by_chunk - best.gather(1, kinds)).exp())
    return total.log() + best, by_chunk


def draw_in_class(
    scaled: torch.Tensor,
    chunks: TokenChunks,
    by_chunk: torch.Tensor,
    kind: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """A token of a given class in each row, drawn from the softmax over the class.

    It is drawn in two stages, as in `vllm_dllm.ops.statistics.sampled`: first a chunk of the class,
    then a token of the chunk.

    Args:
        scaled: ``[rows, ids]``, logits divided by the temperature.
        chunks: the classes of these ids.
        by_chunk: float32 ``[rows, T]``, from `class_logsumexp` of the same logits.
        kind: int64 ``[rows]``, a class. For C (no class) the result is meaningless.
        keys: int64 ``[rows]``, the noise key of each row, see `row_keys`.

    Returns:
        int64 ``[rows]``, ids. Where all logits of the class are -inf, any of its tokens.
    """
    number = torch.arange(len(chunks.chunk_class), device=keys.device)
    chunk_scores = _possible(by_chunk, chunks.chunk_class == kind[:, None])
    chunk = (chunk_scores + gumbel(keys, FIRST_GROUP_INDEX + number)).argmax(-1)  # [rows]
    token = chunks.token.view(-1, CHUNK)[chunk]  # [rows, CHUNK]
    token_scores = _possible(scaled.gather(1, token).float(), chunks.real.view(-1, CHUNK)[chunk])
    place = (token_scores + gumbel(keys, token)).argmax(-1, keepdim=True)
    return token.gather(1, place)[:, 0]


def _possible(score: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """Scores of members, and -inf for others; members that all have -inf are equally likely."""
    score = score.nan_to_num(-torch.inf, torch.inf, -torch.inf).masked_fill(~member, -torch.inf)
    none = score.amax(-1, keepdim=True) == -torch.inf
    return torch.where(none & member, 0.0, score)
