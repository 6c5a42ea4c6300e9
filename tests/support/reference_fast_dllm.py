"""Fast-dLLM v2's reference: `transformers`' Qwen2 under a block-causal mask, read a row before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support import reference
from tests.support.random_weights import SIZES, VOCABULARY, spread, state, write_tokenizer

MASK, END = VOCABULARY - 1, 1


@dataclass(frozen=True)
class Rule(reference.Rule):
    """By default the published one: blocks from left to right, by parts."""

    name: str = "SubBlocks"
    threshold: float = 1.0
    sub_block_length: int | None = 8


class Reference(reference.Reference):
    shifted = True

    def __init__(self, path: Path) -> None:
        self.model, stated = reference.load(path, "Qwen2")
        self.block, self.mask = stated["bd_size"], MASK


def random_checkpoint(path: Path, block: int, tied: bool = False) -> Path:
    """Write a model of random weights. As in published files, only the tokenizer knows the mask."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    changes = {"hidden_size": 128, "tie_word_embeddings": tied, "rope_parameters": rope}
    model = Qwen2ForCausalLM(Qwen2Config(**(SIZES | changes)))
    spread(model, tied_gain=0.35).save_pretrained(path)
    state(
        path,
        architectures=["Fast_dLLM_QwenForCausalLM"],
        model_type="Fast_dLLM_Qwen",
        bd_size=block,
    )
    write_tokenizer(path, END, {MASK: "|<MASK>|"})
    return path
