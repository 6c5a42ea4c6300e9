"""Choose the token of a class that a path goes through: the best one, or a drawn one.

Most of the vocabulary is in a few classes, so the search takes two steps: first among the chunks of
the class, by what `class_weights` has computed for them, then in one chunk.
"""

from __future__ import annotations

import torch

from canvas_grammar.decoding.canvas_logits import CanvasLogits
from canvas_grammar.decoding.class_reduction import cleaned
from canvas_grammar.decoding.log_sums import logsumexp
from canvas_grammar.decoding.noise import gumbel
from canvas_grammar.decoding.token_classes import CHUNK, BatchClasses

# Ranges of chunks, chunks and their tokens draw their noise at indices beyond those that an engine
# uses for ids or groups of ids: a token that was drawn without a constraint must be independent of
# this one.
FIRST_RANGE_INDEX = (1 << 30) + (1 << 28)
FIRST_CHUNK_INDEX = FIRST_RANGE_INDEX + (1 << 26)
FIRST_MEMBER_INDEX = FIRST_CHUNK_INDEX + (1 << 26)


def best_in_class(
    logits: CanvasLogits, classes: BatchClasses, by_chunk: torch.Tensor, kind: torch.Tensor
) -> torch.Tensor:
    """The token of a given class with the largest logit at each position.

    Args:
        logits: those of ``n`` canvases.
        classes: those of the canvases.
        by_chunk: float32 ``[n, L, T + 1]``, from `class_maxima` of the same logits.
        kind: int64 ``[n, L]``, a class. For C (no class), and where the position was not reduced,
            the result is meaningless.

    Returns:
        int64 ``[n, L]``, ids; ties go to the lowest.
    """
    index = _chunks_of(classes, kind, classes.most_chunks)
    # The first chunk that attains the maximum of its class holds the lowest such token.
    pick = by_chunk.gather(2, index).argmax(-1, keepdim=True)
    token = _tokens_of(classes, index.gather(2, pick))
    place = cleaned(logits.pick(token)).argmax(-1, keepdim=True)
    return token.gather(2, place)[..., 0]


def draw_in_class(
    scaled: CanvasLogits,
    classes: BatchClasses,
    by_chunk: torch.Tensor,
    kind: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token of a given class at each position, drawn from the softmax over the class.

    Gumbel noise draws in three stages: a range of ``CHUNK`` chunks of the class, then a chunk, then
    a token. So little noise is needed, however large the class is.

    Args:
        scaled: the logits of ``n`` canvases.
        classes: those of the canvases.
        by_chunk: float32 ``[n, L, T + 1]``, from `class_logsumexp` of the same logits.
        kind: int64 ``[n, L]``, a class, as for `best_in_class`.
        keys: int64 ``[n, L]``, the noise key of each position, see `row_keys`.
        temperature: float32 ``[n, L]``, by which the logits must still be divided, or None.

    Returns:
        int64 ``[n, L]``, ids. If all logits of the class are -inf, it is any of its tokens.
    """
    rows, device = keys.flatten(), keys.device
    index = _chunks_of(classes, kind, -(-classes.most_chunks // CHUNK) * CHUNK)
    within = torch.arange(CHUNK, device=device)
    ranges = by_chunk.gather(2, index).unflatten(2, (-1, CHUNK))  # [n, L, ranges, CHUNK]
    number = FIRST_RANGE_INDEX + torch.arange(ranges.shape[2], device=device)
    score = logsumexp(ranges) + gumbel(rows, number).view(*kind.shape, -1)
    place = score.argmax(-1, keepdim=True) * CHUNK + within  # of the class' chunks, [n, L, CHUNK]
    noise = gumbel(rows, FIRST_CHUNK_INDEX + place.flatten(0, 1)).view(place.shape)
    index = index.gather(2, place)
    pick = (by_chunk.gather(2, index) + noise).argmax(-1, keepdim=True)
    chunk = index.gather(2, pick)
    token = _tokens_of(classes, chunk)
    logit = scaled.pick(token)
    if temperature is not None:
        logit = logit / temperature[..., None]
    real = within < CHUNK - classes.padding.gather(1, _within(classes, chunk)[..., 0])[..., None]
    noise = gumbel(rows, FIRST_MEMBER_INDEX + token.flatten(0, 1)).view(token.shape)
    score = _possible(logit, real) + noise
    return token.gather(2, score.argmax(-1, keepdim=True))[..., 0]


def _chunks_of(classes: BatchClasses, kind: torch.Tensor, size: int) -> torch.Tensor:
    """The chunks of the class `kind` (``[n, L]``), int64 ``[n, L, size]``; T after its last."""
    index = torch.arange(size, device=kind.device) + classes.first_chunk.gather(1, kind)[..., None]
    # This uses arithmetic, because choosing between two numbers by a condition is slow on a CPU.
    over = (index - classes.behind_chunk.gather(1, kind)[..., None]).add_(1).clamp_(0, 1)
    none = classes.chunk_class.shape[1]
    return index.add_(over.mul_(none)).clamp_max_(none)


def _within(classes: BatchClasses, chunk: torch.Tensor) -> torch.Tensor:
    """The chunks without the one after the last."""
    return chunk.clamp_max(classes.chunk_class.shape[1] - 1)


def _tokens_of(classes: BatchClasses, chunk: torch.Tensor) -> torch.Tensor:
    """The tokens of chunks (int64 ``[n, L, 1]``), int64 ``[n, L, CHUNK]``."""
    return classes.token.gather(1, _within(classes, chunk).expand(-1, -1, CHUNK))


def _possible(score: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """Scores of members, and -inf for others; members that all have -inf are equally likely."""
    score = cleaned(score).masked_fill(~member, -torch.inf)
    none = score.amax(-1, keepdim=True) == -torch.inf
    return torch.where(none & member, 0.0, score)
