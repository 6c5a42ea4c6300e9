"""Multi-block decoding: an algorithm decides several consecutive blocks of a canvas in one pass.

The canvas holds N blocks of L positions, and a block sees those before it. A block opens when the
one before is far enough, so that its predictions rest on some decided tokens. In a block whose
predecessor still changes, nothing is decided that the algorithm is not sure of.

Source: the multi-block scheduler of Diffulex (SJTU-DENG-Lab/Diffulex), after D2F (arXiv
2508.09192). There a block that is finished is committed while the next ones are denoised; here a
later pass reads its tokens again, which is the same input, until the canvas is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from vllm_dllm.decoding.base import Algorithm, Canvas, StateTensor, StepContext, Update

# The share of a block that is decided when the next one opens, unless the server has another, and
# when a position of the next one is decided although no prediction there is sure.
ADD_BLOCK, SEMI_COMPLETE = 0.1, 0.9
PASSES = "passes"
# What a wrapped algorithm needs of a step and its canvases.
SHARED = ("name", "config", "reads_decided", "reads_entropy", "samples", "own_confidence")


class InBlocks(Algorithm):
    """An algorithm that is `in_blocks`, on canvases of several blocks.

    To the wrapped algorithm each block is a canvas of its own, with its own state and its own
    number of steps: passes in which it must decide something. So with one open block at a time
    the tokens are those of canvases of one block.
    """

    def __init__(self, algorithm: Algorithm, blocks: int, opens_at: float | None = None) -> None:
        """Wrap `algorithm` for canvases of so many blocks; `opens_at` replaces `ADD_BLOCK`."""
        self.algorithm = algorithm
        self.blocks = blocks
        self.opens_at = opens_at
        vars(self).update({name: getattr(algorithm, name) for name in SHARED})
        self.state: Mapping[str, StateTensor] = {
            PASSES: StateTensor(torch.int64, initial=0, per_position=False, extra=(blocks,)),
            **{
                name: spec if spec.per_position else replace(spec, extra=(blocks, *spec.extra))
                for name, spec in algorithm.state.items()
            },
        }

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`; `context` has `BlockLimits`."""
        if context.blocks is None:
            raise TypeError("a canvas of several blocks has BlockLimits")
        rows, count = len(canvas.tokens), self.blocks

        def by_block(tensor: torch.Tensor) -> torch.Tensor:
            """``[slots, N * L, ...]`` as ``[slots * N, L, ...]``."""
            return tensor.unflatten(1, (count, -1)).flatten(0, 1)

        masked = canvas.masked.unflatten(1, (count, -1))
        opened, forces = open_blocks(masked, context.blocks.open_blocks, self.opens_at)
        passes, parameters = context.state[PASSES], context.parameters.items()
        last = forces & (passes + 1 >= context.blocks.max_steps[:, None])
        before = Canvas(*map(by_block, (canvas.tokens, canvas.masked, canvas.fixed)))
        state = {
            name: by_block(context.state[name])
            if spec.per_position
            else context.state[name].flatten(0, 1)
            for name, spec in self.algorithm.state.items()
        }
        own = replace(
            context,
            statistics=context.statistics.view(rows * count, -1),
            last=last.flatten(),
            parameters={name: value.repeat_interleave(count) for name, value in parameters},
            state=state,
            step=passes.flatten(),
            present=None,  # positions that do not exist are not masked
            forces=forces.flatten(),
            blocks=None,
        )
        update = self.algorithm.step(before, own)

        def where_open(old: torch.Tensor, new: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            # With a row for each block the compiler (torch 2.13) would mix the rows up where a step
            # stores them.
            old, new = (tensor.unflatten(0, (rows, count)) for tensor in (old, new))
            is_open = opened.view(rows, count, *[1] * (old.ndim - 2))
            return torch.where(is_open, new, old).view_as(like)

        after = update.canvas
        tokens = where_open(before.tokens, after.tokens, canvas.tokens)
        undecided = where_open(before.masked, after.masked, canvas.masked)
        kept = {
            name: where_open(old, update.state[name], context.state[name])
            for name, old in state.items()
        }
        return Update(
            Canvas(tokens, undecided, canvas.fixed),
            ~undecided.any(1),
            {PASSES: passes + forces, **kept},
        )


def open_blocks(
    masked: torch.Tensor, at_most: torch.Tensor, opens_at: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks in which positions may be decided now, and where one of them has to be.

    The first block is open. Another one is open if the block before is, and has decided at least
    `opens_at` of its positions, and fewer than `at_most` blocks before are unfinished. A position
    has to be decided in the first unfinished block, and in an open one if the block before has
    decided `SEMI_COMPLETE` of its positions.

    Both results are bool ``[slots, N]``. `masked` is bool ``[slots, N, L]``, `at_most` int64
    ``[slots]``, and `opens_at` a share, 0 to 1; None means `ADD_BLOCK`.
    """
    left, length = masked.sum(2), masked.shape[2]
    before = (length - left[:, :-1]) / length  # the progress of the block before, from block 1 on
    unfinished = (left > 0).long()
    waiting = unfinished.cumsum(1) - unfinished  # unfinished blocks before each
    chain = (before >= (ADD_BLOCK if opens_at is None else opens_at)).long().cumprod(1).bool()
    opened = waiting < at_most[:, None]
    opened[:, 1:] &= chain
    forces = waiting == 0
    forces[:, 1:] |= before >= SEMI_COMPLETE
    return opened, forces & opened
