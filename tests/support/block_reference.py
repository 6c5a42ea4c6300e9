"""Multi-block decoding in a plain loop that reads all tokens again at every step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch


@dataclass
class Answer:
    """The output of a request, how many passes it took, and the smallest margin of a decision."""

    tokens: list[int] = field(default_factory=list)
    passes: int = 0
    margin: float = float("inf")


@dataclass(frozen=True)
class MultiBlock:
    """LowConfidence in canvases of `blocks` blocks, of which at most `most` are open.

    Attributes:
        logits: from tokens to logits ``[tokens, vocabulary]`` under the block-causal mask.
        mask: the mask token.
        length: L.
        context: the most tokens that a request may have.
        tenths: of a block that are decided when the next one opens.
    """

    logits: Callable[[list[int]], torch.Tensor]
    mask: int
    length: int
    blocks: int
    most: int
    context: int = 512
    tenths: int = 1

    def generate(
        self, prompt: list[int], threshold: float, max_tokens: int, ends: Collection[int] = ()
    ) -> Answer:
        """The answer to a prompt; its last block begins the first canvas."""
        answer = Answer()
        known = list(prompt)
        begin = len(prompt) - len(prompt) % self.length
        max_tokens = min(max_tokens, self.context - len(prompt))
        while True:
            width = min(self.blocks * self.length, self.context - begin)
            canvas = known[begin:] + [self.mask] * (begin + width - len(known))
            masked = [begin + i >= len(known) for i in range(width)]
            tail = len(known) - begin
            while (leaves := self._leaves(canvas, masked, tail, ends, max_tokens, answer)) == 0:
                self._step(known[:begin], canvas, masked, threshold, answer)
            for token in canvas[tail:leaves]:
                answer.tokens.append(token)
                if token in ends or len(answer.tokens) == max_tokens:
                    return answer
            known = known[:begin] + canvas
            begin += width

    def _leaves(
        self,
        canvas: list[int],
        masked: list[bool],
        tail: int,
        ends: Collection[int],
        max_tokens: int,
        answer: Answer,
    ) -> int:
        """How many tokens leave: all, or up to the end of the answer; 0 for none."""
        for place in range(len(canvas)):
            if masked[place]:
                return 0
            count = len(answer.tokens) + place + 1 - tail
            if place >= tail and (canvas[place] in ends or count == max_tokens):
                return place + 1
        return len(canvas)

    def _step(
        self,
        context: list[int],
        canvas: list[int],
        masked: list[bool],
        threshold: float,
        answer: Answer,
    ) -> None:
        logits = self.logits(context + canvas)[len(context) :].clone()
        probability = logits.softmax(-1)
        logits[:, self.mask] = -torch.inf
        top = logits.topk(2, dim=-1)
        p = [float(probability[i, top.indices[i, 0]]) for i in range(len(canvas))]
        opened, running, before, chosen, margins = True, 0, 0, [], []
        for at in range(0, len(canvas), self.length):
            masks = [i for i in range(at, at + self.length) if masked[i]]
            far = at == 0 or 10 * before >= self.tenths * self.length
            opened = opened and running < self.most and far
            if not opened:
                break
            forces = running == 0 or 10 * before >= 9 * self.length
            sure = [i for i in masks if p[i] > threshold]
            margins += [abs(p[i] - threshold) for i in masks]
            if forces and masks and not sure:
                best, *others = sorted(masks, key=lambda i: (-p[i], i))
                margins += [p[best] - p[i] for i in others[:1]]
                sure = [best]
            chosen += sure
            before, running = self.length - len(masks), running + bool(masks)
        for i in chosen:
            margins.append(float(top.values[i, 0] - top.values[i, 1]))
            canvas[i], masked[i] = int(top.indices[i, 0]), False
        answer.margin = min([answer.margin, *margins])
        answer.passes += 1
