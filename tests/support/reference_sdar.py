"""SDAR's decoding in a plain loop: `transformers`' Qwen3 under a mask of its own, in float32.

No cache, no batching, no vLLM: every step reads all tokens again. `random_checkpoint` writes a tiny
model to disk, dense or with experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, MASK, END = 300, 299, 1
RULES = ("LowConfidenceDynamic", "LowConfidenceStatic", "Sequential", "EntropyBounded")


@dataclass(frozen=True)
class Rule:
    """A published rule and its settings; `steps` None is one for each position."""

    name: str = "LowConfidenceDynamic"
    threshold: float = 0.9
    steps: int | None = None
    entropy_bound: float = 0.35

    def options(self) -> dict[str, Any]:
        """The same as options of a request."""
        named: dict[str, Any] = {"diffusion_algorithm": self.name}
        if self.name == "LowConfidenceDynamic":
            named["diffusion_threshold"] = self.threshold
        if self.name == "EntropyBounded":
            named["diffusion_entropy_bound"] = self.entropy_bound
        elif self.steps is not None:
            named["diffusion_steps"] = self.steps
        return named

    @classmethod
    def of_options(cls, options: dict[str, Any]) -> Rule:
        """The rule of a request with these options; what they leave out is as by default."""
        names = ("algorithm", "threshold", "steps", "entropy_bound")
        given = {
            name: options[f"diffusion_{name}"] for name in names if f"diffusion_{name}" in options
        }
        return cls(given.pop("algorithm", cls.name), **given)


@dataclass
class Answer:
    """What the reference makes of one request.

    Attributes:
        tokens: the output, the stop token included.
        decided: how many positions each step decided.
        margin: the smallest distance of any decision from going the other way, as a probability,
            a logit or an entropy.
    """

    tokens: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    margin: float = float("inf")


class Reference:
    """The four rules with a checkpoint, one request at a time."""

    def __init__(self, path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        self.mask: int = stated["mask_token_id"]
        experts = stated["model_type"] == "sdar_moe"
        config_class, model_class = (
            (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
        )
        for name in ("block_size", "mask_token_id", "architectures", "model_type"):
            stated.pop(name, None)
        self.model: Any = model_class.from_pretrained(
            path,
            config=config_class(**stated),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()

    def logits(self, tokens: list[int], block: int) -> torch.Tensor:
        """``[tokens, vocabulary]``; position i sees j where j's block is not behind i's."""
        of = torch.arange(len(tokens)) // block
        hidden = of[None, :] > of[:, None]  # [queries, keys]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            found = self.model(
                torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False
            )
        return found.logits[0]

    def generate(
        self, prompt: list[int], max_tokens: int, rule: Rule, block: int, stop: tuple[int, ...] = ()
    ) -> Answer:
        """Fill block after block; the first one begins with the prompt's tail."""
        whole = len(prompt) - len(prompt) % block
        context, tail, answer = prompt[:whole], prompt[whole:], Answer()
        while True:
            canvas = tail + [self.mask] * (block - len(tail))
            open_ = [n >= len(tail) for n in range(block)]
            step = 0
            while any(open_):
                self._step(context, canvas, open_, rule, step, answer)
                step += 1
            for token in canvas[len(tail) :]:
                answer.tokens.append(token)
                if token in stop or len(answer.tokens) == max_tokens:
                    return answer
            context, tail = context + canvas, []

    def _step(
        self,
        context: list[int],
        canvas: list[int],
        open_: list[bool],
        rule: Rule,
        step: int,
        answer: Answer,
    ) -> None:
        logits = self.logits(context + canvas, len(canvas))[len(context) :]
        probability = logits.softmax(-1)
        entropy = -torch.xlogy(probability, probability).sum(-1)
        logits[:, self.mask] = -torch.inf
        top = logits.topk(2, dim=-1)
        masks = [n for n in range(len(canvas)) if open_[n]]
        p = {n: float(probability[n, top.indices[n, 0]]) for n in masks}
        h = {n: float(entropy[n]) for n in masks}
        chosen, margin = _chosen(rule, step, len(canvas), masks, p, h)
        margins = [float(top.values[n, 0] - top.values[n, 1]) for n in chosen]
        for n in chosen:
            canvas[n], open_[n] = int(top.indices[n, 0]), False
        answer.decided.append(len(chosen))
        answer.margin = min(answer.margin, margin, *margins)


def _chosen(
    rule: Rule, step: int, length: int, masks: list[int], p: dict[int, float], h: dict[int, float]
) -> tuple[list[int], float]:
    """The positions that a rule decides, and by how much it is this choice."""
    steps = length if rule.steps is None else rule.steps
    quota = length // steps + (step < length % steps)
    if rule.name == "Sequential":
        return [n for n in masks if n < masks[0] + quota], float("inf")
    if rule.name == "EntropyBounded":
        order, total, chosen, margins = sorted(masks, key=lambda n: (h[n], n)), 0.0, [], []
        for n in order:
            total += h[n]
            if chosen:
                margins.append(abs(total - rule.entropy_bound))
            if not chosen or total < rule.entropy_bound:
                chosen.append(n)
        if len(chosen) < len(order):
            margins.append(h[order[len(chosen)]] - h[chosen[-1]])
        return chosen, min(margins, default=1.0)
    margins = []
    if rule.name == "LowConfidenceDynamic":
        sure = [n for n in masks if p[n] > rule.threshold]
        margins = [abs(p[n] - rule.threshold) for n in masks]
        if len(sure) >= quota:
            return sure, min(margins)
    order = sorted(masks, key=lambda n: (-p[n], n))
    if len(order) > quota:
        margins.append(p[order[quota - 1]] - p[order[quota]])
    return order[:quota], min(margins, default=1.0)


def random_checkpoint(path: Path, experts: bool, block: int, tied: bool = False) -> Path:
    """Write an SDAR of random weights, whose probabilities are spread as a trained model's are."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_theta": 1e6,
    }
    model: Any
    if experts:
        moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe, norm_topk_prob=True)).float()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).float()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            continue  # ones
        gain = 1.6 * weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            gain = 0.5 if tied else 1.6
        elif "lm_head" in name:
            gain *= 2.5
        weight.data = torch.randn(weight.shape, generator=generator) * gain
    model.save_pretrained(path)
    stated = json.loads((path / "config.json").read_text())
    stated |= {"architectures": ["SDARMoeForCausalLM" if experts else "SDARForCausalLM"]}
    stated |= {"model_type": "sdar_moe" if experts else "sdar"}
    stated |= {"block_size": block, "mask_token_id": MASK}
    (path / "config.json").write_text(json.dumps(stated))
    words = WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=f"t{END}")
    tokenizer.save_pretrained(path)
    return path
