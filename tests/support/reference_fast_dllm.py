"""Fast-dLLM v2's decoding in a plain loop: `transformers`' Qwen2 under a mask of its own.

In float32, without a cache, batches or vLLM: every step reads all tokens again. `random_checkpoint`
writes a tiny model to disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY, MASK, END = 300, 299, 1


@dataclass
class Answer:
    """What the reference makes of one request.

    Attributes:
        tokens: the output.
        boundaries: which of them are boundary tokens, as indexes.
        margin: the smallest distance of any decision from going the other way, as a probability or
            a logit.
    """

    tokens: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    margin: float = float("inf")


class Reference:
    """The published rule with a checkpoint, one request at a time."""

    def __init__(self, path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        self.block: int = stated.pop("bd_size")
        for name in ("architectures", "model_type"):
            del stated[name]
        self.model: Any = Qwen2ForCausalLM.from_pretrained(
            path,
            config=Qwen2Config(**stated),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """``[tokens, vocabulary]``; position i sees j where j's block is not behind i's."""
        of = torch.arange(len(tokens)) // self.block
        hidden = of[None, :] > of[:, None]  # [queries, keys]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
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
        threshold: float = 1.0,
        part: int = 8,
    ) -> Answer:
        """Fill block after block, each from left to right by parts of this many positions."""
        answer, tokens = Answer(), list(prompt)
        while True:
            if len(tokens) % self.block == 0:
                answer.boundaries.append(len(tokens) - len(prompt))
                tokens.append(self._boundary(tokens, answer))
            begin, end = len(tokens), -(-len(tokens) // self.block) * self.block
            tokens += [MASK] * (end - begin)
            open_ = list(range(begin, end))
            while open_:
                which = (open_[0] % self.block) // part
                now = [n for n in open_ if (n % self.block) // part == which]
                for n, token in self._decided(tokens, now, threshold, answer).items():
                    tokens[n] = token
                    open_.remove(n)
            answer.tokens = tokens[len(prompt) : len(prompt) + max_tokens]
            if len(answer.tokens) == max_tokens:
                return answer

    def _boundary(self, tokens: list[int], answer: Answer) -> int:
        """The likeliest token after whole blocks."""
        row = self.logits(tokens)[-1]
        row[MASK] = -torch.inf
        top = row.topk(2)
        answer.margin = min(answer.margin, float(top.values[0] - top.values[1]))
        return int(top.indices[0])

    def _decided(
        self, tokens: list[int], now: list[int], threshold: float, answer: Answer
    ) -> dict[int, int]:
        """The tokens of the positions in `now` that a step decides."""
        logits = self.logits(tokens)
        rows = {n: logits[n - 1] for n in now}  # the row before predicts it
        probabilities = {n: row.softmax(-1) for n, row in rows.items()}
        best, margins, p = {}, {}, {}
        for n, row in rows.items():
            row[MASK] = -torch.inf
            top = row.topk(2)
            best[n], margins[n] = int(top.indices[0]), float(top.values[0] - top.values[1])
            p[n] = float(probabilities[n][best[n]])
        order = sorted(now, key=lambda n: (-p[n], n))
        chosen = {order[0]} | {n for n in now if p[n] > threshold}
        close = [margins[n] for n in chosen]
        if threshold < 1:
            close += [abs(p[n] - threshold) for n in now]
        if len(chosen) == 1 and len(order) > 1:
            close.append(p[order[0]] - p[order[1]])
        answer.margin = min([answer.margin, *close])
        return {n: best[n] for n in chosen}


def random_checkpoint(path: Path, block: int, tied: bool = False) -> Path:
    """Write a model of random weights, whose probabilities are spread as a trained model's are.

    As in published files, only the tokenizer knows the mask.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = Qwen2ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            continue  # ones
        gain = 1.6 * weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            gain = 0.35 if tied else 1.6
        elif "lm_head" in name:
            gain *= 2.5
        weight.data = torch.randn(weight.shape, generator=generator) * gain
    model.save_pretrained(path)
    stated = json.loads((path / "config.json").read_text())
    stated |= {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen"}
    stated |= {"bd_size": block}
    (path / "config.json").write_text(json.dumps(stated))
    words = {f"t{n}": n for n in range(MASK)} | {"|<MASK>|": MASK}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), eos_token=f"t{END}"
    )
    tokenizer.save_pretrained(path)
    return path
