"""SDAR's decoding loop as one writes it without an engine: transformers, a KV cache, a batch.

The batch is in lockstep: all rows finish a block before they begin the next one, and rows whose
answer has ended leave the batch between two blocks. Prompts are padded on the left by whole blocks,
so that the canvases of all rows stand at the same place of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Rules:
    """How a request is decoded and where it ends: `LowConfidenceDynamic` (SDAR's default).

    A `threshold` above 1 makes it `LowConfidenceStatic`.
    """

    mask: int
    end: frozenset[int]
    length: int
    threshold: float
    steps: int
    max_tokens: int


def load(path: Path, dtype: torch.dtype) -> Any:
    """The checkpoint's weights in transformers' Qwen3."""
    config = Qwen3Config.from_pretrained(path)
    kind: Any = Qwen3ForCausalLM
    return kind.from_pretrained(path, config=config, dtype=dtype, attn_implementation="sdpa").eval()


class Batch:
    """The rows that are being answered, and their cache."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], rules: Rules) -> None:
        length = rules.length
        self.model, self.rules = model, rules
        whole = [len(prompt) - len(prompt) % length for prompt in prompts]
        self.context = max(whole)
        self.pad = torch.tensor([self.context - each for each in whole])  # [rows]
        self.cache = DynamicCache()
        self.canvas = torch.full((len(prompts), length), rules.mask)
        for row, prompt, known in zip(self.canvas, prompts, whole, strict=True):
            row[: len(prompt) - known] = torch.tensor(prompt[known:], dtype=torch.long)
        self.open = self.canvas == rules.mask
        if self.context:
            ids = torch.zeros(len(prompts), self.context, dtype=torch.long)
            for row, prompt, known in zip(ids, prompts, whole, strict=True):
                row[self.context - known :] = torch.tensor(prompt[:known])
            self.read(ids, 0)

    def read(self, ids: torch.Tensor, start: int) -> Any:
        """Logits of the tokens after the first `start`, which join the cache."""
        end = start + ids.shape[1]
        at = torch.arange(end)
        behind = at[start:, None] // self.rules.length < at[None, :] // self.rules.length
        hidden = behind[None] | (at[None, None, :] < self.pad[:, None, None])
        # What stands on padding sees itself, because a softmax over nothing is not a number.
        hidden &= at[start:, None] != at[None, :]
        floor = torch.finfo(self.model.dtype).min
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype).masked_fill(hidden, floor)
        return self.model(
            input_ids=ids,
            attention_mask=mask[:, None],
            position_ids=(at[start:] - self.pad[:, None]).clamp_min(0),
            past_key_values=self.cache,
            use_cache=True,
        ).logits

    def finish_block(self) -> None:
        """Denoise the canvases of all rows until no mask is left."""
        rules, step = self.rules, 0
        while self.open.any():
            logits = self.read(self.canvas, self.context).float()
            self.cache.crop(-rules.length)
            probability = logits.softmax(-1)
            probability[..., rules.mask] = -1.0  # a mask is never chosen
            probability, token = probability.max(-1)
            share = rules.length // rules.steps + (step < rules.length % rules.steps)
            confidence = probability.masked_fill(~self.open, -1.0)
            best = confidence.argsort(dim=1, descending=True, stable=True)[:, :share]
            chosen = torch.zeros_like(self.open).scatter_(1, best, True) & self.open
            sure = confidence > rules.threshold
            chosen = torch.where(sure.sum(1, keepdim=True) >= share, sure, chosen)
            self.canvas[chosen] = token[chosen]
            self.open &= ~chosen
            step += 1

    def next_block(self, rows: torch.Tensor) -> None:
        """Commit the canvases, and begin the next ones in these rows."""
        self.read(self.canvas, self.context)
        self.context += self.rules.length
        if len(rows) < len(self.pad):
            self.cache.batch_select_indices(rows)
            self.pad = self.pad[rows]
        self.canvas = torch.full((len(rows), self.rules.length), self.rules.mask)
        self.open = torch.ones_like(self.canvas, dtype=torch.bool)


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], rules: Rules) -> list[list[int]]:
    """Answer the prompts in one batch; each answer ends as a request's does."""
    batch = Batch(model, prompts, rules)
    answers: list[list[int]] = [[] for _ in prompts]
    row, skipped = list(range(len(prompts))), [len(prompt) % rules.length for prompt in prompts]
    while row:
        batch.finish_block()
        going_on = []
        for place, n in enumerate(row):
            answers[n] += batch.canvas[place, skipped[n] :].tolist()
            skipped[n] = 0
            if not _cut(answers[n], rules):
                going_on.append(place)
        row = [row[place] for place in going_on]
        if row:
            batch.next_block(torch.tensor(going_on))
    return answers


def _cut(answer: list[int], rules: Rules) -> bool:
    """End an answer after its first end token, or where `max_tokens` are reached."""
    ends = [n + 1 for n, token in enumerate(answer) if token in rules.end]
    end = min([*ends[:1], rules.max_tokens])
    done = bool(ends) or len(answer) >= rules.max_tokens
    if done:
        del answer[end:]
    return done
