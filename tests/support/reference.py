"""Decoding by blocks in a plain loop that reads all tokens again at every step.

No cache, no batching, no vLLM. The module of a family (`reference_sdar`, ...) says which model
gives the logits, what a position sees, and where canvases begin.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

# Decisions closer than this may legitimately fall differently in another order of summation.
MARGIN = 3e-5
# The settings of each rule, by their names in requests.
SETTINGS: dict[str, tuple[str, ...]] = {
    "LowConfidence": ("threshold",),
    "ConfidenceThreshold": ("threshold", "max_steps"),
    "SubBlocks": ("threshold", "sub_block_length"),
    "LowConfidenceDynamic": ("threshold", "steps"),
    "LowConfidenceStatic": ("steps",),
    "LowConfidenceEven": ("steps",),
    "Leftmost": ("steps",),
    "Sequential": ("steps",),
    "EntropyBounded": ("entropy_bound",),
    "TokenEntropyBounded": ("entropy_bound", "steps"),
}


@dataclass(frozen=True)
class Rule:
    """An algorithm and its settings.

    Attributes:
        steps: None is one for each position.
        blocks: in a canvas, of which at most `most` are open; the next one opens when so many
            `tenths` of a block are decided.
    """

    name: str = "LowConfidence"
    threshold: float = 0.9
    steps: int | None = None
    max_steps: int | None = None
    entropy_bound: float = 0.35
    sub_block_length: int | None = None
    blocks: int = 1
    most: int = 1
    tenths: int = 1

    def options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in SETTINGS[self.name]}
        settings = {
            f"diffusion_{name}": value for name, value in given.items() if value is not None
        }
        return {"diffusion_algorithm": self.name} | settings

    @classmethod
    def of_options(cls, options: dict[str, Any]) -> Rule:
        """The rule of a request with these options; what they leave out is as by default."""
        given = {name.removeprefix("diffusion_"): value for name, value in options.items()}
        name = given.pop("algorithm", cls().name)
        return cls(name, **{key: given[key] for key in SETTINGS[name] if key in given})


@dataclass
class Answer:
    """What a reference makes of one request.

    Attributes:
        tokens: the output, the stop token included.
        decided: how many positions each step decided.
        boundaries: which tokens are boundary tokens of a shifted model, as indexes.
        margin: how close the closest decision was (a probability, a logit or an entropy).
    """

    tokens: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    margin: float = float("inf")

    def closer(self, *margins: float) -> None:
        self.margin = min(self.margin, *margins)


class Reference:
    """One checkpoint, one request at a time.

    Attributes:
        model: of `transformers`, in float32.
        aligned: canvases begin at multiples of the block length, with the end of the prompt.
        shifted: the row before a position predicts it.
    """

    aligned: ClassVar[bool] = True
    shifted: ClassVar[bool] = False
    model: Any
    block: int
    mask: int

    def sees(self, count: int, start: int) -> torch.Tensor:
        """``[queries, keys]``: a position sees its own block and those before it."""
        of = torch.arange(count) // self.block
        return of[None, :] <= of[:, None]

    def logits(self, tokens: list[int], start: int | None = None) -> torch.Tensor:
        """``[tokens, vocabulary]``; the canvas begins at `start`, or there is none."""
        sees = self.sees(len(tokens), len(tokens) if start is None else start)
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        with torch.no_grad():
            found = self.model(
                torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False
            )
        logits: torch.Tensor = found.logits[0]
        return logits

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        rule: Any,
        stop: tuple[int, ...] = (),
        room: int = 10**6,
    ) -> Answer:
        """Fill canvas after canvas behind the prompt; the context ends at `room` tokens."""
        known, answer = list(prompt), Answer()
        while True:
            begin = len(known) - (len(known) % self.block if self.aligned else 0)
            if self.shifted and begin == len(known):
                answer.boundaries.append(begin - len(prompt))
                known.append(self._boundary(known, answer))
            left = min(max_tokens, room - len(prompt)) - len(answer.tokens)
            canvas = self.filled(known[:begin], known[begin:], rule, left, stop, room, answer)
            known[begin:] = canvas
            for token in known[len(prompt) + len(answer.tokens) :]:
                answer.tokens.append(token)
                if token in stop or len(answer.tokens) == max_tokens:
                    return answer
            if len(known) == room:
                return answer

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
        """A canvas behind the context that begins with `tail`, with every position decided.

        Or only what is before its first stop token, or before the last of the tokens that are left.
        """
        width = min(rule.blocks * self.block, room - len(context))
        canvas = tail + [self.mask] * (width - len(tail))
        open_, step = list(range(len(tail), width)), 0
        while open_:
            whole = canvas[len(tail) : open_[0]]
            ends = [n for n, token in enumerate(whole) if token in stop]
            if ends or len(whole) >= left:
                return canvas[: open_[0]]
            self._step(context, canvas, open_, rule, step, answer)
            step += 1
        return canvas

    def _boundary(self, tokens: list[int], answer: Answer) -> int:
        row = self.logits(tokens)[-1]
        row[self.mask] = -torch.inf
        top = row.topk(2)
        answer.closer(float(top.values[0] - top.values[1]))
        return int(top.indices[0])

    def _step(
        self,
        context: list[int],
        canvas: list[int],
        open_: list[int],
        rule: Rule,
        step: int,
        answer: Answer,
    ) -> None:
        logits = self.logits(context + canvas, len(context))
        logits = (logits.roll(1, 0) if self.shifted else logits)[len(context) :].clone()
        probability = logits.softmax(-1)
        entropy = (-torch.xlogy(probability, probability).sum(-1)).tolist()
        logits[:, self.mask] = -torch.inf
        top = logits.topk(2, dim=-1)
        p = probability.gather(1, top.indices[:, :1])[:, 0].tolist()
        if rule.blocks > 1:
            chosen, margin = _over_blocks(rule, self.block, len(canvas), open_, p)
        else:
            chosen, margin = decided(rule, step, len(canvas), open_, p, entropy)
        answer.closer(margin, *(float(top.values[n, 0] - top.values[n, 1]) for n in chosen))
        answer.decided.append(len(chosen))
        for n in chosen:
            canvas[n] = int(top.indices[n, 0])
            open_.remove(n)


def load(path: Path, kind: str) -> tuple[Any, dict[str, Any]]:
    """A checkpoint as a model of `transformers` in float32, and what its configuration states.

    `kind` is how the classes of `transformers` are called.
    """
    stated = json.loads((path / "config.json").read_text())
    left_out = ("architectures", "model_type", "auto_map")
    fields = {name: value for name, value in stated.items() if name not in left_out}
    model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        path,
        config=getattr(transformers, f"{kind}Config")(**fields),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    return model.eval(), stated


def decided(
    rule: Rule, step: int, length: int, open_: list[int], p: list[float], h: list[float]
) -> tuple[list[int], float]:
    """The positions that a rule decides, and by how much it is this choice.

    Of the positions of a canvas `p` has the probability and `h` the entropy; `open_` are the
    undecided ones, at least one.
    """
    order = sorted(open_, key=lambda n: (-p[n], n))
    steps = length if rule.steps is None else rule.steps
    if rule.max_steps is not None and step == rule.max_steps - 1:
        return list(open_), 1.0
    if rule.name == "SubBlocks":
        size = rule.sub_block_length or 8
        return _sure(rule, [n for n in order if n // size == open_[0] // size], p)
    if rule.name in ("LowConfidence", "ConfidenceThreshold"):
        return _sure(rule, order, p)
    if rule.name == "EntropyBounded":
        return _within_bound(rule.entropy_bound, open_, h)
    if rule.name == "TokenEntropyBounded":
        if step >= steps - 1:
            return list(open_), 1.0
        return _within_bound(rule.entropy_bound, open_, [-c * math.log(max(c, 1e-12)) for c in p])
    if rule.name in ("LowConfidenceEven", "Leftmost"):
        left = len(open_) if rule.steps is None else max(1, steps - step)
        quota = math.ceil(len(open_) / left)
        return (open_[:quota], 1.0) if rule.name == "Leftmost" else _surest(order, quota, p)
    quota = max(1, length // steps + (step < length % steps))
    if rule.name == "Sequential":
        return [n for n in open_ if n < open_[0] + quota], 1.0
    margins = []
    if rule.name == "LowConfidenceDynamic":
        sure = [n for n in open_ if p[n] > rule.threshold]
        margins = [abs(p[n] - rule.threshold) for n in open_]
        if len(sure) >= quota:
            return sure, min(margins)
    chosen, margin = _surest(order, quota, p)
    return chosen, min(margin, *margins, 1.0)


def _surest(order: list[int], quota: int, p: list[float]) -> tuple[list[int], float]:
    margin = p[order[quota - 1]] - p[order[quota]] if quota < len(order) else 1.0
    return order[:quota], margin


def _sure(rule: Rule, order: list[int], p: list[float]) -> tuple[list[int], float]:
    at_least = rule.name == "ConfidenceThreshold"
    sure = [n for n in order if p[n] > rule.threshold or (at_least and p[n] == rule.threshold)]
    margin = min(abs(p[n] - rule.threshold) for n in order) if rule.threshold < 1 else 1.0
    if sure:
        return sure, margin
    chosen, gap = _surest(order, 1, p)
    return chosen, min(margin, gap)


def _within_bound(bound: float, open_: list[int], h: list[float]) -> tuple[list[int], float]:
    """The positions of least entropy whose sum stays below a bound, and at least one."""
    order, total, chosen, margins = sorted(open_, key=lambda n: (h[n], n)), 0.0, [], [1.0]
    for n in order:
        total += h[n]
        if chosen:
            margins.append(abs(total - bound))
        if not chosen or total < bound:
            chosen.append(n)
    if len(chosen) < len(order):
        margins.append(h[order[len(chosen)]] - h[chosen[-1]])
    return chosen, min(margins)


def _over_blocks(
    rule: Rule, block: int, width: int, open_: list[int], p: list[float]
) -> tuple[list[int], float]:
    running, before, chosen, margins = 0, 0, [], [1.0]
    for at in range(0, width, block):
        masks = [n for n in open_ if at <= n < at + block]
        if running == rule.most or (at > 0 and 10 * before < rule.tenths * block):
            break
        sure = [n for n in masks if p[n] > rule.threshold]
        margins += [abs(p[n] - rule.threshold) for n in masks]
        if masks and not sure and (running == 0 or 10 * before >= 9 * block):
            sure, gap = _surest(sorted(masks, key=lambda n: (-p[n], n)), 1, p)
            margins.append(gap)
        chosen += sure
        before, running = block - len(masks), running + bool(masks)
    return chosen, min(margins)
