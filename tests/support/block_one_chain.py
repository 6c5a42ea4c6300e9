"""Decoding a block position by position in plain loops: what `SelfSpeculativeExact` has to equal.

No cache and no draft: for each position, the model reads all tokens before it and one mask. Blocks
before are read under the model's own mask, and a position of the current block sees what precedes
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from examples.tiny.llada2 import LLaDA2
from tests.support.reference_sdar import Reference

# From token ids and a mask (bool ``[tokens, tokens]``, true where a query sees a key) to the logits
# ``[vocabulary]`` of the last position.
Model = Callable[[list[int], torch.Tensor], torch.Tensor]


@dataclass
class Chain:
    """An answer, and the smallest lead of any of its tokens over the next likely one, in logits."""

    tokens: list[int] = field(default_factory=list)
    margin: float = float("inf")


def chain(
    model: Model, prompt: list[int], block: int, mask_token: int, ends: tuple[int, ...], most: int
) -> Chain:
    """The answer to a prompt; `ends` end it, and so do `most` tokens."""
    answer, known = Chain(), list(prompt)
    while True:
        ids = [*known, mask_token]
        logits = model(ids, visible(len(ids), block)).clone()
        logits[mask_token] = -torch.inf
        best = logits.topk(2)
        answer.margin = min(answer.margin, float(best.values[0] - best.values[1]))
        known.append(int(best.indices[0]))
        answer.tokens.append(known[-1])
        if known[-1] in ends or len(answer.tokens) == most:
            return answer


def visible(count: int, block: int) -> torch.Tensor:
    """Bool ``[count, count]``: by blocks, but by positions in the block of the last one."""
    position = torch.arange(count)
    current = (count - 1) // block * block
    of = torch.where(position < current, position // block, position + count)
    return of[None] <= of[:, None]


def sdar(reference: Reference) -> Model:
    """SDAR, by `transformers`' Qwen3."""

    def logits(ids: list[int], sees: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        with torch.no_grad():
            found = reference.model(
                torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False
            )
        return found.logits[0, -1]

    return logits


def llada2(network: LLaDA2) -> Model:
    """LLaDA2, by the module that trained the tiny checkpoint."""

    def logits(ids: list[int], sees: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = network.model.word_embeddings(torch.tensor([ids]))
            rope = network.rope(torch.arange(len(ids)))
            for layer in network.model.layers:
                x = layer(x, rope, sees)
            return network.lm_head(network.model.norm(x))[0, -1]

    return logits
