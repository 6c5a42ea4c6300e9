"""Quantize a LLaDA2 checkpoint with LLM Compressor: FP8, INT8, W4A16 or NVFP4.

    python -m examples.quantize.llada2 SOURCE OUT --scheme nvfp4 --samples 128 [--text FILE]

transformers has no LLaDA2, so the model is the plain module of `examples/tiny/llada2.py`, which
has the checkpoint's names. Only NVFP4 needs to run it, for the range of each layer's inputs: on
samples whose last block is masked at random, as decoding finds it. Every expert sees every
token, so that none is left without a range.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

from examples.quantize.calibration import arguments, run, samples
from examples.quantize.storage import Source
from examples.tiny.llada2 import Experts, LLaDA2, Shape

MASK = "<|mask|>"


class Config(PretrainedConfig):
    """`config.json` as it is; LLM Compressor reads it again, by the folder's name."""

    model_type = "llada2_moe"


AutoConfig.register(Config.model_type, Config)


class EveryToken(Experts):
    """Experts that all see all tokens; the router's choice decides what comes out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        expert, weight = self.gate(flat)
        out = self.shared_experts(flat)
        for index, mlp in enumerate(self.experts):
            out = out + mlp(flat) * (weight * (expert == index)).sum(1, keepdim=True)
        return out.view_as(x)


class Quantizable(PreTrainedModel):
    """The plain module as LLM Compressor wants one; tensors keep their names."""

    config_class = Config

    def __init__(self, plain: LLaDA2, config: Config) -> None:
        super().__init__(config)
        self.model, self.lm_head, self.shape = plain.model, plain.lm_head, plain.shape
        self._rope = plain._rope

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, **unused: Any) -> torch.Tensor:
        return LLaDA2.forward(self, input_ids)  # type: ignore[arg-type]


def load(path: Path) -> Quantizable:
    """A checkpoint of one file or many, in the dtype of its weights."""
    config = json.loads((path / "config.json").read_text())
    fields = Shape.__dataclass_fields__
    shape = Shape(**{name: config[name] for name in fields if config.get(name) is not None})
    source = Source(path)
    with torch.device("meta"):
        plain = LLaDA2(shape)
    plain.load_state_dict({name: source[name] for name in source.files}, strict=False, assign=True)
    for module in plain.modules():
        if type(module) is Experts:
            module.__class__ = EveryToken
            # Counts tokens for training; no checkpoint has it.
            module.gate.load = torch.zeros(shape.num_experts)
    return Quantizable(plain.float(), AutoConfig.from_pretrained(path)).eval()


def batches(path: Path, text: Path | None, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """One row each: clean blocks, and a last one whose answer is masked at a random rate."""
    tokenizer, rng = AutoTokenizer.from_pretrained(path), random.Random(seed)
    config = json.loads((path / "config.json").read_text())
    length = config.get("block_length") or 32
    mask = config.get("mask_token_id")
    mask = tokenizer.convert_tokens_to_ids(MASK) if mask is None else mask
    for sample in samples(tokenizer, text, seed):
        ids = sample.prompt + sample.answer
        ids += [tokenizer.eos_token_id] * (-len(ids) % length)
        rate, start = rng.random(), max(len(sample.prompt), len(ids) - length)
        hidden = [mask if rng.random() < rate else token for token in ids[start:]]
        yield {"input_ids": torch.tensor([ids[:start] + hidden])}


def main() -> None:
    args = arguments(__doc__)
    run(args, load, partial(batches, args.source, args.text, args.seed))


if __name__ == "__main__":
    main()
