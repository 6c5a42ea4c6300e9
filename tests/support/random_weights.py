"""Tiny checkpoints of random weights whose probabilities are spread as a trained model's are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

VOCABULARY = 300
# What the families that `transformers` has a backbone for have in common.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def spread(model: Any, tied_gain: float = 0.5) -> Any:
    model.float()
    tied, generator = model.config.tie_word_embeddings, torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            continue  # ones
        gain = 1.6 * weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            gain = tied_gain if tied else 1.6
        elif "lm_head" in name:
            gain *= 2.5
        weight.data = torch.randn(weight.shape, generator=generator) * gain
    return model


def state(path: Path, **changes: Any) -> None:
    """Change fields of a written configuration."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_tokenizer(path: Path, end: int, masks: dict[int, str] | None = None) -> None:
    """A word for each id; `masks` are special tokens that have another one."""
    masks = masks or {}
    words = {masks.get(n, f"t{n}"): n for n in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in masks.values()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{end}")
    fast.save_pretrained(path)
