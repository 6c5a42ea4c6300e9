"""A block-causal Qwen2: `transformers`' own class under a mask of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support import reference
from tests.support.random_weights import SIZES, VOCABULARY, spread, state, write_tokenizer

BLOCK, MASK = 8, VOCABULARY - 1


class Reference(reference.Reference):
    """Low-confidence decoding with a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.block, self.mask = BLOCK, MASK
        self.model = Qwen2ForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def random_checkpoint(path: Path, tied: bool) -> Path:
    """Write a Qwen2 of random weights."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    spread(Qwen2ForCausalLM(Qwen2Config(**(SIZES | heads)))).save_pretrained(path)
    state(
        path,
        architectures=["BlockQwen2ForCausalLM"],
        canvas_length=BLOCK,
        mask_token_id=MASK,
    )
    write_tokenizer(path, 1)
    return path
