"""SDAR's reference: `transformers`' Qwen3, dense or with experts, under a block-causal mask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support import reference
from tests.support.random_weights import SIZES, VOCABULARY, spread, state, write_tokenizer

MASK, END = VOCABULARY - 1, 1
RULES = ("LowConfidenceDynamic", "LowConfidenceStatic", "Sequential", "EntropyBounded")


@dataclass(frozen=True)
class Rule(reference.Rule):
    """By default the published one."""

    name: str = RULES[0]


class Reference(reference.Reference):
    def __init__(self, path: Path) -> None:
        experts = json.loads((path / "config.json").read_text())["model_type"] == "sdar_moe"
        self.model, stated = reference.load(path, "Qwen3Moe" if experts else "Qwen3")
        self.mask, self.block = stated["mask_token_id"], stated["block_size"]


def random_checkpoint(path: Path, experts: bool, block: int, tied: bool = False) -> Path:
    sizes = SIZES | {"head_dim": 32, "tie_word_embeddings": tied, "rope_theta": 1e6}
    model: Any
    if experts:
        moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe, norm_topk_prob=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    spread(model).save_pretrained(path)
    state(
        path,
        architectures=["SDARMoeForCausalLM" if experts else "SDARForCausalLM"],
        model_type="sdar_moe" if experts else "sdar",
        block_size=block,
        mask_token_id=MASK,
    )
    write_tokenizer(path, END)
    return path
