"""openPangu-R's reference: `transformers`' Llama in float64, read a row before.

Everything but the canvas is causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import reference, reference_fast_dllm, reference_nemotron
from tests.support.random_weights import SIZES, VOCABULARY, spread, state, write_tokenizer

MASK, END = VOCABULARY - 2, 1


@dataclass(frozen=True)
class Rule(reference_fast_dllm.Rule):
    """By default the published one: the surest position of the whole block."""

    sub_block_length: int | None = 32


class Reference(reference.Reference):
    aligned, shifted = False, True
    sees = reference_nemotron.Reference.sees

    def __init__(self, path: Path) -> None:
        self.model, stated = reference.load(path, "Llama")
        self.model.double()
        self.mask, self.block = MASK, stated["block_size"]


def random_checkpoint(path: Path, block: int, mask: int | None = MASK) -> Path:
    """Write a model of random weights; without a mask it is an autoregressive one."""
    rope = {"rope_type": "default", "rope_theta": 1.6e7}
    changes = {"head_dim": 32, "attention_bias": True, "rope_parameters": rope}
    spread(LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))).save_pretrained(path)
    state(
        path,
        architectures=["PanguEmbeddedForCausalLM"],
        model_type="PanguEmbedded",
        bias=True,
        block_size=block,
        mask_token_id=mask,
    )
    write_tokenizer(path, END)
    return path
