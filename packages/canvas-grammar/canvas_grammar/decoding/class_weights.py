"""Reduce logits over a vocabulary to one weight per token class, as dynamic programming needs.

Only positions that are *wanted* are reduced: those inside a window whose token is not forced. On a
CPU the others cost nothing. On a GPU all positions are reduced, because finding out which ones are
wanted would mean waiting for the GPU.

Each class' sum has its own largest logit as its origin, so that no class underflows however far it
is below the rest of its row.

A CPU gathers about one logit per nanosecond, which is most of the cost of a constraint. So it reads
a wide class (see `token_classes`) only if its weight is not known otherwise. The weight is known if
the token that would be chosen without a constraint is in the class: its largest logit is then that
of the whole row, and its sum is that of the whole row without all other tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from canvas_grammar.decoding.canvas_logits import CanvasLogits, FreeTokens, may_read
from canvas_grammar.decoding.class_reduction import (
    ClassWeights,
    LogitsTile,
    tiles_of_cpu,
    tiles_of_gpu,
)
from canvas_grammar.decoding.token_classes import BatchClasses

# The sum of a wide class is that of its row without all other tokens only if this share is left.
# The less is left, the more the rounding of both sums matters.
LEAST_SHARE = 0.5


def class_maxima(
    logits: CanvasLogits, classes: BatchClasses, wanted: torch.Tensor, free: FreeTokens
) -> ClassWeights:
    """The largest logit of each class, and of the chunks of those that are read.

    Args:
        logits: those of ``n`` canvases.
        classes: those of the canvases.
        wanted: bool ``[n, L]``, the positions that are needed.
        free: the tokens of the largest logits. Chunks of their classes may be missing.
    """
    found = ClassWeights.none(wanted, classes)

    def reduce(part: LogitsTile) -> None:
        top, best = part.maxima(part.gathered(logits).amax(-1))
        part.write(found, best, top)

    def settle() -> torch.Tensor:
        known = wanted & _in_wide(classes, free)
        found.put_wide(classes, known, free.weight)
        return known

    _reduce(classes, wanted, reduce, settle)
    return found.without_none(classes)


def class_logsumexp(
    scaled: CanvasLogits, classes: BatchClasses, wanted: torch.Tensor, free: FreeTokens
) -> ClassWeights:
    """The log-sum-exp of the logits of each class and chunk; arguments as for `class_maxima`.

    `free` are tokens drawn from the same logits, independently of everything that is done with
    the result.
    """
    found = ClassWeights.none(wanted, classes)

    def reduce(part: LogitsTile) -> None:
        gathered = part.gathered(scaled)
        part.write(found, *part.sums(gathered, gathered.amax(-1)))

    def settle() -> torch.Tensor:
        known, weight = _wide_sums(found, classes, free)
        found.put_wide(classes, known & wanted, weight)
        return known

    _reduce(classes, wanted, reduce, settle)
    return found.without_none(classes)


def class_maxima_and_logsumexp(
    logits: CanvasLogits,
    temperature: torch.Tensor,
    classes: BatchClasses,
    wanted: torch.Tensor,
    free: tuple[FreeTokens, FreeTokens],
) -> tuple[ClassWeights, ClassWeights]:
    """`class_maxima` of logits, and `class_logsumexp` of logits divided by a temperature.

    Args:
        logits: those of ``n`` canvases.
        temperature: float32 ``[n, L]``, above 0.
        classes: those of the canvases.
        wanted: bool ``[n, L]``, the positions that are needed.
        free: as for these two functions.
    """
    largest, total = (ClassWeights.none(wanted, classes) for _ in range(2))

    def reduce(part: LogitsTile) -> None:
        gathered = part.gathered(logits)
        top, best = part.maxima(gathered.amax(-1))
        part.write(largest, best, top)
        warmth = part.rows(temperature)[..., None]
        part.write(total, *part.sums(gathered.div_(warmth[..., None]), top / warmth))

    def settle() -> torch.Tensor:
        known, weight = _wide_sums(total, classes, free[1])
        known &= wanted & _in_wide(classes, free[0])
        largest.put_wide(classes, known, free[0].weight)
        total.put_wide(classes, known, weight)
        return known

    _reduce(classes, wanted, reduce, settle)
    return largest.without_none(classes), total.without_none(classes)


def _reduce(
    classes: BatchClasses,
    wanted: torch.Tensor,
    reduce: Callable[[LogitsTile], None],
    settle: Callable[[], torch.Tensor],
) -> None:
    """Reduce all that is wanted, but wide classes only if `settle` finds no other way.

    Args:
        classes: those of all canvases.
        wanted: bool ``[n, L]``.
        reduce: reduces a part of the rows and chunks.
        settle: gives wide classes their weights where it can, when all others have theirs. It
            returns where, bool ``[n, L]``.
    """
    if not may_read(wanted):
        for part in tiles_of_gpu(classes, wanted):
            reduce(part)
        return
    for part in tiles_of_cpu(classes, wanted, wide=False):
        reduce(part)
    for part in tiles_of_cpu(classes, wanted & ~settle(), wide=True):
        reduce(part)


def _in_wide(classes: BatchClasses, free: FreeTokens) -> torch.Tensor:
    """Where the free token is in the wide class and its weight is a number; bool ``[n, L]``."""
    return (classes.of_tokens(free.token) == classes.wide[:, None]) & free.weight.isfinite()


def _wide_sums(
    found: ClassWeights, classes: BatchClasses, free: FreeTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the sum of the wide class is known (bool ``[n, L]``), and this sum (``[n, L]``)."""
    rest = found.by_class.logsumexp(-1)
    share = -torch.expm1(rest - free.weight)
    return _in_wide(classes, free) & (share >= LEAST_SHARE), free.weight + share.log()
