"""LLaDA2's decoding loop as one writes it without an engine: plain PyTorch, a lockstep batch.

`Cached` keeps keys and values of committed blocks, `Recomputing` nothing. Both decode by the same
rule as `LowConfidence` and finish a block in all rows before they begin the next one; rows whose
answer has ended leave the batch between two blocks. The tests hold their answers against the
engine's, and `benchmarks/llada2.py` measures the three side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.tiny.llada2 import Attention, LLaDA2


@dataclass(frozen=True)
class Rules:
    """How a request is decoded and where it ends."""

    mask: int
    end: frozenset[int]
    threshold: float
    max_tokens: int


class Recomputing:
    """Every step reads prompt, finished blocks and canvas again."""

    needs_commit = False

    def __init__(self, model: LLaDA2) -> None:
        self.model = model
        self.length = model.shape.block_length

    def begin(self, ids: torch.Tensor, start: torch.Tensor) -> None:
        """Nothing is kept."""

    def keep(self, rows: torch.Tensor) -> None:
        """Nothing is kept."""

    def read(self, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """A row's canvas does not see what is behind it, because the mask is block-causal."""
        logits = self.model(ids[:, : int(start.max()) + self.length])
        return logits.gather(
            1, _canvas(start, self.length)[:, :, None].expand(-1, -1, logits.shape[2])
        )


class Cached:
    """Keys and values of everything before the canvas are kept, ``[rows, tokens, heads, dim]``."""

    needs_commit = True

    def __init__(self, model: LLaDA2) -> None:
        self.model = model
        self.length = model.shape.block_length

    def begin(self, ids: torch.Tensor, start: torch.Tensor) -> None:
        """Read the prompts' whole blocks."""
        shape = self.model.shape
        size = (*ids.shape, shape.num_key_value_heads, shape.head_dim)
        layers = range(shape.num_hidden_layers)
        self.cache = [
            (ids.new_zeros(size, dtype=torch.float32), ids.new_zeros(size, dtype=torch.float32))
            for _ in layers
        ]
        if whole := int(start.max()):
            position = torch.arange(whole).expand(len(ids), -1)
            self._forward(ids[:, :whole], position)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these."""
        self.cache = [(k[rows], v[rows]) for k, v in self.cache]

    def read(self, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Read the canvas over the cache; its keys and values are written to its place there."""
        position = _canvas(start, self.length)
        hidden = self._forward(ids.gather(1, position), position)
        return self.model.lm_head(self.model.model.norm(hidden))

    def _forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        body = self.model.model
        last = int(position.max()) + 1
        # A query sees everything up to the end of its block.
        mask = torch.arange(last) < (position[:, :, None] // self.length + 1) * self.length
        rope = self.model.rope(position[:, None])  # for all heads
        x = body.word_embeddings(tokens)
        for layer, cache in zip(body.layers, self.cache, strict=True):
            read = layer.input_layernorm(x)
            x = x + _attend(layer.attention, read, rope, mask[:, None], (position, *cache))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x


def _attend(
    attention: Attention,
    x: torch.Tensor,
    rope: torch.Tensor,
    mask: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """`Attention.forward` with keys and values from a cache of (positions to write, K, V)."""
    position, *cached = cache
    q, *new = attention.project(x, rope)
    row, last = torch.arange(len(x))[:, None], mask.shape[-1]
    for old, fresh in zip(cached, new, strict=True):
        old[row, position] = fresh.transpose(1, 2)
    k, v = (old[:, :last].transpose(1, 2) for old in cached)
    return attention.attend(q, k, v, mask)


def _canvas(start: torch.Tensor, length: int) -> torch.Tensor:
    return start[:, None] + torch.arange(length)


@torch.inference_mode()
def generate(
    reader: Cached | Recomputing, prompts: Sequence[Sequence[int]], rules: Rules
) -> list[list[int]]:
    """Answer the prompts in one lockstep batch; each answer ends as a request's does."""
    length = reader.length
    size = torch.tensor([len(prompt) for prompt in prompts])
    room = int(size.max()) + rules.max_tokens + length
    ids = torch.full((len(prompts), room), rules.mask)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    start, row = size - size % length, torch.arange(len(prompts))
    reader.begin(ids, start)
    answers: list[list[int]] = [[] for _ in prompts]
    while len(row):
        _finish_block(reader, ids, start, rules)
        position = _canvas(start, length)
        for n, tokens in zip(row.tolist(), ids.gather(1, position).tolist(), strict=True):
            done = len(prompts[n]) + len(answers[n])
            answers[n] = _ended(answers[n] + tokens[done % length :], rules)
        on = torch.tensor([_goes_on(answers[n], rules) for n in row.tolist()])
        if reader.needs_commit and on.any():
            reader.read(ids, start)
        if not on.all():
            ids, start, row = ids[on], start[on], row[on]
            reader.keep(on)
        start = start + length
    return answers


def _finish_block(
    reader: Cached | Recomputing, ids: torch.Tensor, start: torch.Tensor, rules: Rules
) -> None:
    """Denoise every row's canvas in ``ids`` until no mask is left in any."""
    position = _canvas(start, reader.length)
    open_ = ids.gather(1, position) == rules.mask
    while open_.any():
        logits = reader.read(ids, start)
        probability = logits.softmax(-1)
        probability[:, :, rules.mask] = 0
        sure, token = probability.max(-1)  # [rows, L]
        sure = sure.masked_fill(~open_, -1)
        accept = sure > rules.threshold
        accept |= torch.zeros_like(accept).scatter_(1, sure.argmax(1, keepdim=True), True)
        accept &= open_
        canvas = torch.where(accept, token, ids.gather(1, position))
        ids.scatter_(1, position, canvas)
        open_ &= ~accept


def _ended(answer: list[int], rules: Rules) -> list[int]:
    """Up to its first end token and to ``max_tokens``."""
    stop = next((n + 1 for n, token in enumerate(answer) if token in rules.end), len(answer))
    return answer[: min(stop, rules.max_tokens)]


def _goes_on(answer: list[int], rules: Rules) -> bool:
    return len(answer) < rules.max_tokens and answer[-1] not in rules.end
