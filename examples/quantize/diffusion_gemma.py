"""Quantize a DiffusionGemma checkpoint with LLM Compressor: FP8, INT8, W4A16 or NVFP4.

    python -m examples.quantize.diffusion_gemma SOURCE OUT --scheme nvfp4 [--text FILE]

The model is transformers' own class. Two things are done to it first. Its experts are tensors
of three dimensions, which LLM Compressor passes over, so they become one module each. And its
encoder and its decoder, which share their weights, are made to share their modules: vLLM has one
of each layer, whose inputs must cover both. NVFP4 then needs the range of each layer's inputs,
from prompts (the encoder) and from canvases of random noise, with and without a prediction to
start from (the decoder). Every expert sees every token, so that none is left without a range.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from examples.quantize.calibration import arguments, run, samples

DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
TEMPERATURE = 0.6  # of the prediction that a canvas starts from; the middle of the schedule


class ExpertMLP(nn.Module):
    """One expert, as three linear layers."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Any) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
            layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
            setattr(self, name, layer)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class OneByOne(nn.ModuleList):
    """A layer's experts; all see all tokens, the router's choice decides what comes out."""

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + expert(hidden) * share.to(hidden.dtype)
        return out


class Quantizable(DiffusionGemmaForBlockDiffusion):
    """Prompt and canvas in one call, the canvas twice: the second time with a prediction."""

    def get_output_embeddings(self) -> None:
        """None: LLM Compressor would take the head away while it calibrates, for speed."""

    def forward(self, prompt: torch.Tensor, canvas: torch.Tensor, **unused: Any) -> torch.Tensor:
        encoded = self.model.encoder(input_ids=prompt)
        decode = partial(
            super().forward,
            past_key_values=encoded.past_key_values,
            decoder_input_ids=canvas,
            decoder_position_ids=prompt.shape[1] + torch.arange(canvas.shape[1])[None],
        )
        earlier = decode().logits / TEMPERATURE
        return decode(self_conditioning_logits=earlier).logits


def load(path: Path) -> Quantizable:
    """A checkpoint whose two halves share their modules."""
    whole = Quantizable.from_pretrained(path, dtype=torch.float32)
    encoder, decoder = whole.model.encoder.language_model, whole.model.decoder
    for layer in decoder.layers:
        if hasattr(layer, "experts"):
            fused = layer.experts
            layer.experts = OneByOne(
                ExpertMLP(gate_up, down, fused.act_fn)
                for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True)
            )
    for own, other in zip(encoder.layers, decoder.layers, strict=True):
        for name in ("experts", "mlp"):
            if hasattr(other, name):
                setattr(own, name, getattr(other, name))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if getattr(other.self_attn, name, None) is not None:
                setattr(own.self_attn, name, getattr(other.self_attn, name))
    return whole.eval()


def spellings(name: str) -> tuple[str, ...]:
    """A layer of one half is a layer of both."""
    for half in (DECODER, ENCODER):
        if name.startswith(half):
            rest = name.removeprefix(half)
            return DECODER + rest, ENCODER + rest
    return (name,)


def batches(path: Path, text: Path | None, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """A prompt and the canvas after it, with a random share of random tokens."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    tokenizer, rng = AutoTokenizer.from_pretrained(path), random.Random(seed)
    vocabulary, length = config.text_config.vocab_size, config.canvas_length
    for sample in samples(tokenizer, text, seed):
        clean = (sample.answer + [tokenizer.pad_token_id] * length)[:length]
        rate = rng.random()
        canvas = [rng.randrange(vocabulary) if rng.random() < rate else token for token in clean]
        yield {"prompt": torch.tensor([sample.prompt]), "canvas": torch.tensor([canvas])}


def main() -> None:
    args = arguments(__doc__)
    run(args, load, partial(batches, args.source, args.text, args.seed), spellings)


if __name__ == "__main__":
    main()
