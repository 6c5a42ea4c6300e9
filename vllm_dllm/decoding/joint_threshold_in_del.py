"""JointThresholdInDel: decide, rewrite, delete and insert tokens in the same step (LLaDA2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import (
    ALL_BESIDE,
    Algorithm,
    Beside,
    Canvas,
    EditTokens,
    StateTensor,
    StepContext,
    Update,
    confidence,
    precedes,
)
from vllm_dllm.decoding.quota import quota
from vllm_dllm.ops.statistics.rows import RankedTokens
from vllm_dllm.ranges import AlgorithmConfig, setting

KEPT = 64  # canvases that are remembered; the default cap is 50 steps with blocks of 32
TRIES = 5


@dataclass(frozen=True)
class JointThresholdInDelConfig(AlgorithmConfig):
    """Settings of `JointThresholdInDel`."""

    threshold: float = setting(0.5, "decide masked positions that are surer than this")
    edit_threshold: float = setting(0.0, "rewrite visible positions that are surer than this")
    steps: int = setting(
        32, "steps after which every mask is decided", least=1, whole=True, blocks=4
    )
    max_post_edit_steps: int = setting(16, "steps that only edit, at most", whole=True, blocks=4)


class JointThresholdInDel(Algorithm):
    """Editing that also removes positions and inserts masks; the canvas keeps its length.

    With M the masked positions, of which those of the fresh canvas are *original* and numbered m at
    first, V the visible ones that are not fixed, x the argmax and p its probability, both without
    the mask token, step s = 0, 1, ... of S `steps` does::

        need    = floor(m / S) + [s < m mod S] + (masks in M that are not original)
        decide  {i in M : p_i > threshold} if it has `need` positions, else the `need` largest p;
                all of M when s >= S
        rewrite {i in V : x_i differs from the token there and p_i > edit_threshold}

    If these writes make a canvas that an earlier step has made, the least sure position that
    changes gets the other one of its two best tokens, at most `TRIES` times. A position that holds
    its old token again does not change, so the next try takes another one. Then, from left to
    right::

        DELETE  the position is removed
        SPLIT   a mask, and after it what stood there before this step

    and the canvas is cut, or filled with masks, at its right end. These masks are not original; a
    position keeps whether it is, wherever it moves.

    A step counts against `max_post_edit_steps` if it begins without original masks. The last round
    is the step at which the count reaches it (or, where it is 0, the one that decides the last
    original masks), and the step cap. It decides all masks, and neither deletes nor splits.
    The canvas is done after it, and when a step that begins without masks changes nothing.

    Source: ``_joint_decode_block`` of inclusionAI/LLaDA2.2-flash, as FluxServe (FLX-OSS/FluxServe)
    and SGLang (PR 31773) describe it. There the position that escapes a loop is a random one, and
    the mask may be predicted. The last `KEPT` canvases are remembered.
    """

    name: str = "JointThresholdInDel"
    config: type[AlgorithmConfig] = JointThresholdInDelConfig
    state: Mapping[str, StateTensor] = MappingProxyType(
        {
            "original": StateTensor(torch.bool, initial=0),
            "at_first": StateTensor(torch.int64, initial=-1, per_position=False),
            "post_edit_steps": StateTensor(torch.int32, initial=0, per_position=False),
            "seen": StateTensor(torch.int32, initial=-1, extra=(KEPT,)),
        }
    )
    edits: bool = True
    samples: bool = False
    likeliest: int = 3  # the final token is neither of the two edits
    moves: bool = True
    excludes: frozenset[Beside] = ALL_BESIDE

    def cap(self, length: int, settings: AlgorithmConfig) -> int:
        """See `Algorithm.cap`: the schedule, all editing steps, and one at either end."""
        values = settings.values()
        return max(length, int(values["steps"])) + int(values["max_post_edit_steps"]) + 2

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        ids, found, step = context.edit_tokens, context.likeliest, context.step
        if ids is None or found is None or step is None:
            raise TypeError("JointThresholdInDel needs edit tokens, ranked tokens and the step")
        number, masked = context.parameters, canvas.masked
        at_first, original = context.state["at_first"], context.state["original"]
        begins = at_first < 0
        original = torch.where(begins[:, None], masked, original)
        at_first = torch.where(begins, masked.sum(1), at_first)
        any_original = (masked & original).any(1)
        post = torch.where(any_original, 0, context.state["post_edit_steps"] + 1)

        token, sureness = found.tokens[..., 0], found.probability[..., 0]
        need = quota(at_first, context) + (masked & ~original).sum(1)
        sure = masked & (sureness > number["threshold"][:, None])
        best = masked & (precedes(confidence(canvas, sureness)).sum(2) < need[:, None])
        decide = torch.where((sure.sum(1) >= need)[:, None], sure, best)
        decide = decide | (masked & (step >= number["steps"])[:, None])
        rewrite = ~masked & ~canvas.fixed & (token != canvas.tokens)
        rewrite = rewrite & (sureness > number["edit_threshold"][:, None])

        budget = number["max_post_edit_steps"]
        decides_last = any_original & ~(masked & original & ~decide).any(1)
        last = torch.where(budget > 0, post >= budget, decides_last) | context.last
        decide = torch.where(last[:, None], masked, decide)
        token = torch.where(last[:, None], _plain(found, ids), token)
        written = torch.where(decide | rewrite, token, canvas.tokens)

        changed = (written != canvas.tokens) & ~last[:, None]
        written = _unseen(canvas.tokens, written, changed, found, context.state["seen"])
        now = torch.arange(KEPT, device=step.device) == (step % KEPT)[:, None]
        seen = torch.where(now[:, None], written[..., None], context.state["seen"]).int()

        after, original = _edited(canvas, written, masked & ~decide, original, ids)
        unchanged = (after.tokens == canvas.tokens).all(1) & ~masked.any(1)
        # Only masks that are not original can be left where there is no budget.
        complete = ~after.masked.any(1) & (post > budget)
        state = {"original": original, "at_first": at_first}
        state |= {"post_edit_steps": post.int(), "seen": seen}
        return Update(after, last | unchanged | complete, state)


def _plain(found: RankedTokens, ids: EditTokens) -> torch.Tensor:
    """The likeliest token of a position that neither deletes nor splits, int64 ``[slots, L]``."""
    edits = (found.tokens == ids.delete) | (found.tokens == ids.split)
    return found.tokens.gather(-1, edits.int().argmin(-1, keepdim=True))[..., 0]


def _unseen(
    before: torch.Tensor,
    written: torch.Tensor,
    changed: torch.Tensor,
    found: RankedTokens,
    seen: torch.Tensor,
) -> torch.Tensor:
    """The first canvas that is not among `seen`, int64 ``[slots, L]``; the last try if all are.

    Only the positions in `changed` (bool ``[slots, L]``) may get other tokens than `written` has;
    the earlier canvases are int32 ``[slots, L, KEPT]``.
    """
    second = found.tokens[..., 1]
    sureness = torch.where(changed, -found.probability[..., 0], -torch.inf)
    order = precedes(sureness).sum(2)  # the least sure first, and last those that do not change
    number = torch.arange(1 + TRIES, device=written.device)  # of tries
    # Each try takes the next position, up to one whose second best token is not the old one: that
    # position goes on changing, so further tries alternate between its two best tokens.
    to_and_fro = torch.where(changed & (second != before), order, TRIES).amin(1, keepdim=True)
    further = (number - 1 - to_and_fro).clamp_min(0)
    taken = number - further - further % 2  # [slots, tries]
    second_best = changed[:, None] & (order[:, None] < taken[..., None])
    tried = torch.where(second_best, second[:, None], written[:, None])  # [slots, tries, L]
    repeats = (tried[..., None] == seen[:, None]).all(2).any(-1)  # [slots, tries]
    first = torch.where(repeats, TRIES, number).amin(1)
    return tried.gather(1, first[:, None, None].expand(-1, 1, written.shape[1]))[:, 0]


def _edited(
    canvas: Canvas,
    written: torch.Tensor,
    masked: torch.Tensor,
    original: torch.Tensor,
    ids: EditTokens,
) -> tuple[Canvas, torch.Tensor]:
    """Remove and insert positions, from left to right.

    `canvas` is that before the step; `written` and `masked` are its tokens and masks after the
    writes. Returns the canvases, and where their positions are `original` ones.
    """
    length = written.shape[1]
    splits = (written == ids.split) & ~canvas.fixed
    removed = (written == ids.delete) & ~canvas.fixed
    width = 1 + splits.long() - removed.long()
    end = width.cumsum(1)
    place = torch.arange(length, device=written.device)
    # The position that comes to each place: the first one that ends after it.
    source = (end[:, None, :] <= place[:, None]).sum(2)  # [slots, L]
    behind = source == length
    source = source.clamp_max(length - 1)
    old = splits.gather(1, source)
    fresh = behind | (old & ((end - width).gather(1, source) == place))
    token = torch.where(old, canvas.tokens.gather(1, source), written.gather(1, source))
    still = torch.where(old, canvas.masked.gather(1, source), masked.gather(1, source))
    after = Canvas(torch.where(fresh, ids.mask, token), still | fresh, canvas.fixed)
    return after, original.gather(1, source) & ~fresh
