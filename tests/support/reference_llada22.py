"""LLaDA2.2 in plain loops, float32, without a cache: block routing, and decoding that edits.

`in_del_step` is one step of the rule on lists. `Reference22` is LLaDA2's reference with the experts
of a block chosen together, and `random_checkpoint22` writes a model that edits often.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.reference import Answer
from tests.support.reference_llada2 import Reference, random_checkpoint, swiglu

TRIES = 5


@dataclass(frozen=True)
class Rule:
    """The settings of the rule, and the ids of the model."""

    mask: int
    delete: int
    split: int
    threshold: float = 0.5
    edit_threshold: float = 0.0
    steps: int = 32
    max_post_edit_steps: int = 16

    def cap(self, length: int) -> int:
        return max(length, self.steps) + self.max_post_edit_steps + 2

    def options(self) -> dict[str, Any]:
        names = ("threshold", "edit_threshold", "steps", "max_post_edit_steps")
        return {f"diffusion_{name}": getattr(self, name) for name in names}


@dataclass
class Cell:
    """A position: what stands there, and whether it was masked at first."""

    token: int
    masked: bool
    original: bool
    fixed: bool


@dataclass
class Block:
    """A block that is being decoded.

    Attributes:
        further: whether the last step took other tokens than the likeliest.
        margin: the smallest distance of any decision from going the other way.
    """

    cells: list[Cell]
    at_first: int
    step: int = 0
    post: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    further: bool = False
    margin: float = math.inf

    @classmethod
    def fresh(cls, tail: list[int], length: int, mask: int) -> Block:
        cells = [Cell(token, False, False, True) for token in tail]
        cells += [Cell(mask, True, True, False) for _ in range(length - len(tail))]
        return cls(cells, length - len(tail))

    @property
    def tokens(self) -> list[int]:
        return [cell.token for cell in self.cells]

    def closer(self, *margins: float) -> None:
        self.margin = min(self.margin, *margins)


def in_del_step(
    block: Block, ranked: list[list[int]], q: list[list[float]], rule: Rule, last: bool
) -> bool:
    """One step; whether the block is done. `ranked` and `q` are tokens and probabilities."""
    cells, block.further = block.cells, False
    masks = [i for i, cell in enumerate(cells) if cell.masked]
    originals = [i for i in masks if cells[i].original]
    block.post = 0 if originals else block.post + 1

    quota = block.at_first // rule.steps + (block.step < block.at_first % rule.steps)
    need = quota + len(masks) - len(originals)
    if block.step >= rule.steps:
        decide = masks
    else:
        decide = [i for i in masks if q[i][0] > rule.threshold]
        block.closer(*(abs(q[i][0] - rule.threshold) for i in masks), 1.0)
        if len(decide) < need:
            order = sorted(masks, key=lambda i: (-q[i][0], i))
            decide = order[:need]
            if need < len(order):
                block.closer(q[order[need - 1]][0] - q[order[need]][0])
    rewrite = [
        i
        for i, cell in enumerate(cells)
        if not cell.masked
        and not cell.fixed
        and ranked[i][0] != cell.token
        and q[i][0] > rule.edit_threshold
    ]
    if rule.edit_threshold > 0:
        open_ = [i for i, cell in enumerate(cells) if not (cell.masked or cell.fixed)]
        block.closer(*(abs(q[i][0] - rule.edit_threshold) for i in open_), 1.0)

    if rule.max_post_edit_steps > 0:
        final = block.post >= rule.max_post_edit_steps
    else:
        final = bool(originals) and set(originals) <= set(decide)
    final = final or last
    if final:
        decide = masks
    new = block.tokens
    for i in (*decide, *rewrite):
        choice = ranked[i]
        if final:
            choice = [token for token in choice if token not in (rule.delete, rule.split)]
        block.further |= choice[0] != ranked[i][0]
        new[i] = choice[0]

    for _ in range(0 if final else TRIES):
        changed = [i for i in sorted((*decide, *rewrite)) if new[i] != cells[i].token]
        if tuple(new) not in block.seen or not changed:
            break
        order = sorted(changed, key=lambda i: (q[i][0], i))
        if len(order) > 1:
            block.closer(q[order[1]][0] - q[order[0]][0])
        current = order[0]
        block.further = True
        new[current] = next(token for token in ranked[current] if token != new[current])
    block.seen.add(tuple(new))

    after: list[Cell] = []
    for i, cell in enumerate(cells):
        written = Cell(new[i], cell.masked and i not in decide, cell.original, cell.fixed)
        if cell.fixed:
            after.append(cell)
        elif new[i] == rule.split:
            after += [Cell(rule.mask, True, False, False), cell]
        elif new[i] != rule.delete:
            after.append(written)
    length, before = len(cells), block.tokens
    padding = [Cell(rule.mask, True, False, False) for _ in range(length)]
    block.cells = (after + padding)[:length]
    block.step += 1
    unchanged = not masks and block.tokens == before
    left = any(cell.masked for cell in block.cells)
    return final or unchanged or (not left and block.post > rule.max_post_edit_steps)


class Reference22(Reference):
    """LLaDA2's reference with block routing, and its rule that edits."""

    def __init__(self, path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        weights = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
        super().__init__(stated, weights, stated["block_size"], stated["mask_token_id"])

    def _experts(self, x: torch.Tensor, p: str) -> torch.Tensor:
        c, w = self.config, self.weights
        share = torch.sigmoid(x @ w[f"{p}.gate.weight"].T)
        score = (share + w[f"{p}.gate.expert_bias"]).tolist()
        taken: dict[int, list[tuple[int, float]]] = {}  # by expert: tokens and weights
        for first in range(0, len(x), self.block):
            rows = range(first, min(first + self.block, len(x)))
            best = [max(score[t][e] for t in rows) for e in range(c["num_experts"])]
            pool = sorted(range(len(best)), key=lambda e: (-best[e], e))[: c["expert_capacity"]]
            for t in rows:
                own = sorted(pool, key=lambda e: (-score[t][e], e))[: c["num_experts_per_tok"]]
                total = float(share[t, own].sum()) + 1e-20
                for e in own:
                    weight = float(share[t, e]) / total * c["routed_scaling_factor"]
                    taken.setdefault(e, []).append((t, weight))
        out = swiglu(x, w, f"{p}.shared_experts")
        for e, pairs in taken.items():
            for t, weight in pairs:
                out[t] += weight * swiglu(x[t : t + 1], w, f"{p}.experts.{e}")[0]
        return out

    def filled(
        self,
        context: list[int],
        tail: list[int],
        rule: Any,
        left: int,
        stop: tuple[int, ...],
        room: int,
        answer: Answer,
    ) -> list[int]:
        """See `Reference`; the editing rule has a loop of its own."""
        if not isinstance(rule, Rule):
            return super().filled(context, tail, rule, left, stop, room, answer)
        block, done = Block.fresh(tail, self.block, rule.mask), False
        while not done:
            done = self._edit(context, block, rule)
        answer.closer(block.margin)
        assert not any(cell.masked for cell in block.cells)
        return block.tokens

    def _edit(self, context: list[int], block: Block, rule: Rule) -> bool:
        logits = self.logits(context + block.tokens)[len(context) :]
        logits[:, rule.mask] = -torch.inf
        probability = logits.softmax(-1)
        top = logits.topk(4, dim=-1)
        ranked = top.indices[:, :3].tolist()
        q = [[float(probability[i, token]) for token in row] for i, row in enumerate(ranked)]
        free = [i for i, cell in enumerate(block.cells) if not cell.fixed]
        last = block.step + 1 >= rule.cap(len(block.cells))
        done = in_del_step(block, ranked, q, rule, last)
        # Which tokens were compared: the two best, and all of them where others were taken.
        gaps = -top.values.diff(dim=-1)[:, : None if block.further else 1]
        block.closer(*(float(gaps[i].min()) for i in free))
        return done


def random_checkpoint22(path: Path, block: int, seed: int = 3, loud: float = 1.6) -> dict[str, Any]:
    """Write a LLaDA2.2 of random weights; `loud` makes its edit tokens more likely than others."""
    config = random_checkpoint(
        path,
        seed,
        num_hidden_layers=2,
        num_experts=16,
        expert_capacity=4,
        # As in the published file, and not used.
        n_group=8,
        topk_group=4,
        block_size=block,
        use_qk_norm=True,
        mask_token_id=299,
        delete_token_id=290,
        split_token_id=291,
    )
    weights = load_file(path / "model.safetensors")
    head = weights["lm_head.weight"]
    for name in ("delete_token_id", "split_token_id"):
        head[config[name]] = (head[config[name]] * loud).bfloat16().float()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return json.loads((path / "config.json").read_text())
