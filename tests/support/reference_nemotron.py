"""Nemotron-Labs-Diffusion in plain loops: `transformers`' Ministral 3 under masks of its own.

No cache, no batching, no vLLM: every step reads all tokens again, in float32. `random_checkpoint`
writes a tiny model to disk, and `autoregressive_checkpoint` the same weights as vLLM's own class
reads them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Ministral3Config, Ministral3ForCausalLM, PreTrainedTokenizerFast

VOCABULARY, MASK, END = 300, 100, 2
RULES = ("ConfidenceThreshold", "LowConfidenceEven", "Leftmost")


@dataclass(frozen=True)
class Rule:
    """A published rule and its settings; `steps` None is one for each position."""

    name: str = "ConfidenceThreshold"
    threshold: float = 0.9
    steps: int | None = None

    def options(self) -> dict[str, Any]:
        """The same as options of a request."""
        named: dict[str, Any] = {"diffusion_algorithm": self.name}
        if self.name == "ConfidenceThreshold":
            named["diffusion_threshold"] = self.threshold
            if self.steps is not None:
                named["diffusion_max_steps"] = self.steps
        elif self.steps is not None:
            named["diffusion_steps"] = self.steps
        return named


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
    """The published rules with a checkpoint, one request at a time."""

    def __init__(self, path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        self.mask: int = stated["mask_token_id"]
        for name in ("block_size", "mask_token_id", "architectures", "model_type"):
            stated.pop(name, None)
        config = Ministral3Config(**stated)
        config._attn_implementation = "eager"
        self.model: Any = Ministral3ForCausalLM(config).float().eval()
        self.model.load_state_dict(ministral_names(load_file(path / "model.safetensors")))

    def logits(self, context: list[int], canvas: list[int]) -> torch.Tensor:
        """``[tokens, vocabulary]``: the context is causal, and the canvas sees everything."""
        tokens, start = context + canvas, len(context)
        place = torch.arange(len(tokens))
        sees = (place[None, :] <= place[:, None]) | (place[:, None] >= start)  # [queries, keys]
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        with torch.no_grad():
            found = self.model(
                torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False
            ).logits[0]
        found[:, self.mask] = -torch.inf
        return found

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        rule: Rule,
        block: int,
        stop: tuple[int, ...] = (),
        room: int = 10**6,
    ) -> Answer:
        """Fill block after block behind the prompt; the context ends at `room` tokens."""
        context, answer = list(prompt), Answer()
        while True:
            length = min(block, room - len(context))
            canvas, step = [self.mask] * length, 0
            open_ = [True] * length
            while any(open_):
                self._step(context, canvas, open_, rule, step, block, answer)
                step += 1
            for token in canvas:
                answer.tokens.append(token)
                if token in stop or len(answer.tokens) == max_tokens:
                    return answer
            context += canvas
            if len(context) == room:
                return answer

    def _step(
        self,
        context: list[int],
        canvas: list[int],
        open_: list[bool],
        rule: Rule,
        step: int,
        block: int,
        answer: Answer,
    ) -> None:
        logits = self.logits(context, canvas)[len(context) :]
        top, p = logits.topk(2, dim=-1), logits.softmax(-1).amax(-1).tolist()
        masks = [n for n in range(len(canvas)) if open_[n]]
        order = sorted(masks, key=lambda n: (-p[n], n))
        steps = block if rule.steps is None else rule.steps
        margin = 1.0
        if rule.name == "ConfidenceThreshold":
            chosen = [n for n in masks if p[n] >= rule.threshold or n == order[0]]
            margin = min(abs(p[n] - rule.threshold) for n in masks)
            if len(chosen) == 1 and len(order) > 1:
                margin = min(margin, p[order[0]] - p[order[1]])
            if rule.steps is not None and step == rule.steps - 1:
                chosen, margin = masks, 1.0
        else:
            left = max(1, steps - step) if rule.steps is not None else len(masks)
            count = math.ceil(len(masks) / left)
            chosen = masks[:count] if rule.name == "Leftmost" else order[:count]
            if rule.name == "LowConfidenceEven" and count < len(order):
                margin = p[order[count - 1]] - p[order[count]]
        for n in chosen:
            canvas[n], open_[n] = int(top.indices[n, 0]), False
            margin = min(margin, float(top.values[n, 0] - top.values[n, 1]))
        answer.decided.append(len(chosen))
        answer.margin = min(answer.margin, margin)

    def linear_spec(self, prompt: list[int], max_tokens: int, block: int) -> tuple[list[int], int]:
        """Draft and verify until `max_tokens` are there; the tokens, and how often it verified."""
        known, rounds = list(prompt), 0
        while len(known) < len(prompt) + max_tokens:
            canvas = known[-1:] + [self.mask] * (block - 1)
            drafted = self.logits(known[:-1], canvas)[len(known) - 1 :].argmax(-1).tolist()
            canvas = known[-1:] + drafted[1:]
            predicted = self.logits(known[:-1] + canvas, [])[len(known) - 1 :].argmax(-1).tolist()
            count = 0
            while count < block - 1 and predicted[count] == canvas[count + 1]:
                count += 1
            known += predicted[: count + 1]
            rounds += 1
        return known[len(prompt) : len(prompt) + max_tokens], rounds

    def greedy_margin(self, prompt: list[int], answer: list[int]) -> float:
        """How surely an answer is that of greedy autoregressive decoding; below 0 if it is not."""
        logits = self.logits(prompt + answer, [])[len(prompt) - 1 : -1]
        chosen = torch.tensor(answer)[:, None]
        own = logits.gather(1, chosen)[:, 0]
        others = logits.scatter(1, chosen, -torch.inf).amax(1)
        return float((own - others).min())


def ministral_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The authors' tensors under the names of Ministral 3."""
    return {
        name.replace("encoder.", "model.", 1).replace("diffusion_head.", "lm_head.", 1): tensor
        for name, tensor in tensors.items()
    }


def random_checkpoint(path: Path, block: int, likely: int = VOCABULARY) -> Path:
    """Write a model of random weights, whose probabilities are spread as a trained model's are.

    YaRN and the growth of queries begin at position 32. Of the vocabulary, `likely` ids are nearly
    always chosen, so that with few of them a draft is often right.
    """
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "eos_token_id": END,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    }
    model = Ministral3ForCausalLM(Ministral3Config(**sizes)).float()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            continue  # ones
        gain = 1.6 * weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            gain = 1.6
        elif "lm_head" in name:
            gain *= 2.5
        weight.data = torch.randn(weight.shape, generator=generator) * gain
    head = model.lm_head.weight.data
    head[likely:] *= 0.1
    if likely < VOCABULARY:
        pairs = likely // 2 * 2
        head[1:pairs:2] = -head[0:pairs:2]  # so that one of them always has a large logit
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head.", 1): tensor
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    stated = sizes | {"architectures": ["NemotronLabsDiffusionModel"]}
    stated |= {"model_type": "nemotron_labs_diffusion", "dlm_paradigm": "bidirectional"}
    stated |= {"block_size": block, "mask_token_id": MASK}
    _write(path, stated)
    return path


def autoregressive_checkpoint(path: Path, of: Path) -> Path:
    """Write the same weights as a Ministral 3, which vLLM's own class decodes token by token."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = ministral_names(load_file(of / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((of / "config.json").read_text())
    for name in ("block_size", "mask_token_id", "dlm_paradigm"):
        del stated[name]
    rope = stated["rope_parameters"]
    stated |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    # vLLM's class reads it from here.
    stated["llama_4_scaling"] = {
        "beta": rope["llama_4_scaling_beta"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
    }
    _write(path, stated)
    return path


def _write(path: Path, config: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(config))
    words = WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=f"t{END}")
    tokenizer.save_pretrained(path)
