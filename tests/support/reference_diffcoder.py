"""Stable-DiffCoder's reference: `transformers`' Llama under a block-causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import reference
from tests.support.random_weights import SIZES, VOCABULARY, spread, state, write_tokenizer

__all__ = ["BLOCK", "END", "MASK", "VOCABULARY", "Reference", "Rule", "random_checkpoint"]
MASK, END, BLOCK = 5, 2, 4


@dataclass(frozen=True)
class Rule(reference.Rule):
    """By default the authors' threshold."""

    name: str = "ConfidenceThreshold"
    threshold: float = 0.95


class Reference(reference.Reference):
    def __init__(self, path: Path) -> None:
        self.model, stated = reference.load(path, "Llama")
        self.block = stated.get("block_size", BLOCK)
        self.mask = stated.get("mask_token_id", MASK)


def random_checkpoint(path: Path, first_release: bool = False, **changes: Any) -> Path:
    """Write a Stable-DiffCoder of random weights, perhaps under the architecture's first name."""
    own = {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": END,
    }
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | own | changes)))
    spread(model).save_pretrained(path)
    name = "SeedDiffcoder" if first_release else "StableDiffcoder"
    state(
        path,
        architectures=[f"{name}ForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"},
    )
    write_tokenizer(path, END, {MASK: "<[MASK_TOKEN]>"})
    return path
