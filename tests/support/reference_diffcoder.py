"""Stable-DiffCoder's decoding in a plain loop: `transformers`' Llama under a mask of its own.

No cache, no batching, no vLLM: every step reads all tokens again, in float32. `random_checkpoint`
writes a tiny model to disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, MASK, END, BLOCK = 300, 5, 2, 4
# Decisions closer than this may legitimately fall differently in another order of summation.
MARGIN = 3e-5


@dataclass(frozen=True)
class Rule:
    """A threshold, or without one a number of steps that a block's masks are spread over."""

    threshold: float | None = 0.95
    steps: int = 512

    def options(self) -> dict[str, Any]:
        """The same as options of a request; nothing for the authors' own threshold."""
        if self.threshold is None:
            return {"diffusion_algorithm": "LowConfidenceEven", "diffusion_steps": self.steps}
        return {} if self.threshold == 0.95 else {"diffusion_threshold": self.threshold}


@dataclass
class Answer:
    """What the reference makes of one request.

    Attributes:
        tokens: the output, the stop token included.
        decided: how many positions each step decided.
        margin: the smallest distance of any decision from going the other way, as a probability or
            a logit.
    """

    tokens: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    margin: float = float("inf")


class Reference:
    """Both rules with a checkpoint, one request at a time."""

    def __init__(self, path: Path, block: int = BLOCK, mask: int = MASK) -> None:
        self.block, self.mask = block, mask
        stated = json.loads((path / "config.json").read_text())
        del stated["architectures"], stated["auto_map"]
        self.model: Any = LlamaForCausalLM.from_pretrained(
            path, config=LlamaConfig(**stated), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """``[tokens, vocabulary]``; a position sees its own block and those before it."""
        count = len(tokens)
        blocked = torch.full((count, count), torch.finfo(torch.float32).min)
        for query in range(count):
            blocked[query, : (query // self.block + 1) * self.block] = 0
        with torch.no_grad():
            found = self.model(
                torch.tensor([tokens]), attention_mask=blocked[None, None], use_cache=False
            )
        return found.logits[0]

    def generate(
        self, prompt: list[int], max_tokens: int, rule: Rule, stop: tuple[int, ...] = ()
    ) -> Answer:
        """Fill block after block of the absolute grid, until a stop token or `max_tokens`."""
        tokens, answer = list(prompt), Answer()
        while True:
            start = len(tokens) // self.block * self.block
            open_ = list(range(len(tokens), start + self.block))
            tokens += [self.mask] * len(open_)
            entry, step = len(open_), 0
            while open_:
                quota = entry // rule.steps + (step < entry % rule.steps)
                step += 1
                if rule.threshold is None and quota == 0:
                    continue
                for place in self._chosen(tokens, open_, rule.threshold, quota, answer):
                    open_.remove(place)
            for token in tokens[len(prompt) + len(answer.tokens) :]:
                answer.tokens.append(token)
                if token in stop or len(answer.tokens) == max_tokens:
                    return answer

    def _chosen(
        self,
        tokens: list[int],
        open_: list[int],
        threshold: float | None,
        quota: int,
        answer: Answer,
    ) -> list[int]:
        """Write one step's tokens, and return where they are."""
        logits = self.logits(tokens)
        sure, token, margins = {}, {}, []
        for place in open_:
            row = logits[place]
            probability = row.softmax(-1)
            row[self.mask] = -torch.inf
            best = row.topk(2)
            token[place] = int(best.indices[0])
            sure[place] = float(probability[token[place]])
            margins.append(float(best.values[0] - best.values[1]))
        order = sorted(open_, key=lambda place: (-sure[place], place))
        if threshold is not None:
            quota = max(1, sum(sure[place] >= threshold for place in order))
            margins += [abs(sure[place] - threshold) for place in order]
        if quota < len(order) and (threshold is None or sure[order[0]] < threshold):
            margins.append(sure[order[quota - 1]] - sure[order[quota]])
        for place in order[:quota]:
            tokens[place] = token[place]
        answer.decided.append(len(order[:quota]))
        answer.margin = min(answer.margin, *margins)
        return order[:quota]


def random_checkpoint(path: Path, first_release: bool = False, **changes: Any) -> Path:
    """Write a Stable-DiffCoder of random weights, whose probabilities are spread as trained ones.

    Args:
        path: a folder that is created.
        first_release: under the architecture's first name.
        changes: fields of the configuration.
    """
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": END,
        }
        | changes
    )
    model = LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            continue  # ones
        gain = 1.6 * weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            gain = 0.5 if config.tie_word_embeddings else 1.6
        elif "lm_head" in name:
            gain *= 2.5
        weight.data = torch.randn(weight.shape, generator=generator) * gain
    model.save_pretrained(path)
    stated = json.loads((path / "config.json").read_text())
    name = "SeedDiffcoder" if first_release else "StableDiffcoder"
    stated["architectures"] = [f"{name}ForCausalLM"]
    stated["auto_map"] = {
        "AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"
    }
    (path / "config.json").write_text(json.dumps(stated))
    words = {f"t{n}": n for n in range(VOCABULARY) if n != MASK} | {"<[MASK_TOKEN]>": MASK}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken("<[MASK_TOKEN]>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{END}")
    fast.save_pretrained(path)
    return path
