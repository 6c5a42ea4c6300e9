"""Nemotron-Labs-Diffusion's reference: `transformers`' Ministral 3 under masks of its own.

`autoregressive_checkpoint` writes the same weights as vLLM's own class reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Ministral3Config, Ministral3ForCausalLM

from tests.support import reference
from tests.support.published import nemotron_config
from tests.support.random_weights import SIZES, VOCABULARY, spread, write_tokenizer

MASK, END = 100, 2


@dataclass(frozen=True)
class Rule(reference.Rule):
    """By default the published one."""

    name: str = "ConfidenceThreshold"


class Reference(reference.Reference):
    aligned = False

    def __init__(self, path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        self.mask, self.block = stated["mask_token_id"], stated["block_size"]
        del stated["architectures"], stated["model_type"]
        config = Ministral3Config(**stated)
        config._attn_implementation = "eager"
        self.model = Ministral3ForCausalLM(config).float().eval()
        self.model.load_state_dict(ministral_names(load_file(path / "model.safetensors")))

    def sees(self, count: int, start: int) -> torch.Tensor:
        """The context is causal, and the canvas sees everything."""
        place = torch.arange(count)
        return (place[None, :] <= place[:, None]) | (place[:, None] >= start)

    def logits(self, tokens: list[int], start: int | None = None) -> torch.Tensor:
        found = super().logits(tokens, start)
        found[:, self.mask] = -torch.inf
        return found

    def linear_spec(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Draft and verify until `max_tokens` are there; the tokens, and how often it verified."""
        known, rounds, block = list(prompt), 0, self.block
        while len(known) < len(prompt) + max_tokens:
            canvas = known[-1:] + [self.mask] * (block - 1)
            start = len(known) - 1
            drafted = self.logits(known[:-1] + canvas, start)[start:].argmax(-1).tolist()
            canvas = known[-1:] + drafted[1:]
            predicted = self.logits(known[:-1] + canvas)[start:].argmax(-1).tolist()
            count = 0
            while count < block - 1 and predicted[count] == canvas[count + 1]:
                count += 1
            known += predicted[: count + 1]
            rounds += 1
        return known[len(prompt) : len(prompt) + max_tokens], rounds

    def greedy_margin(self, prompt: list[int], answer: list[int]) -> float:
        """How surely an answer is that of greedy autoregressive decoding; below 0 if it is not."""
        logits = self.logits(prompt + answer)[len(prompt) - 1 : -1]
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
    """Write a model of random weights.

    YaRN and the growth of queries begin at position 32. Of the vocabulary, `likely` ids are nearly
    always chosen, so that with few of them a draft is often right.
    """
    sizes = SIZES | {
        "head_dim": 32,
        "eos_token_id": END,
        "rope_parameters": nemotron_config("nemotron-labs-diffusion-3b")["rope_parameters"]
        | {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5},
    }
    model = spread(Ministral3ForCausalLM(Ministral3Config(**sizes)))
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
    write_tokenizer(path, END)
