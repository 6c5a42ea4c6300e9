"""DiffusionGemma's reference: transformers' own class, with every random choice in our hands.

`random_checkpoint` writes a small float32 model; `Reference` runs ``generate`` on it from given
starting canvases, with the authors' window rule or with ``|q - k| < W``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion, DiffusionGemmaGenerationConfig

from examples.tiny import train_diffusion_gemma as tiny
from examples.tiny.tokens import gemma_processor
from vllm_dllm.ops.noise.keyed import Stream, row_keys, uniform_tokens

VOCABULARY = 272
# Greedy: the published schedule times next to nothing.
COLD = {"t_min": 1e-6, "t_max": 2e-6}


def random_checkpoint(path: Path, seed: int, canvas: int = 32, **text: Any) -> None:
    """Write a random model with DiffusionGemma's architecture; `text` overrides its text config."""
    processor = gemma_processor()
    kinds = ("pad", "eos", "bos", "boi", "eoi", "image")
    special = {
        f"{kind}_token_id": getattr(processor.tokenizer, f"{kind}_token_id") for kind in kinds
    }
    shape = {"hidden_size": 64, "num_hidden_layers": 3} | text
    vocabulary = shape.pop("vocab_size", VOCABULARY)
    config = tiny.model_config(vocabulary, special, canvas=canvas, **shape)
    config.dtype = "float32"
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config)
    tiny.initialise(model)
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight.data *= 3  # a spread of the logits like a trained model's
        elif "embed_vision" in name:
            weight.data *= 50  # else an image drowns in the text
        elif weight.ndim == 1 and "vision" not in name:
            weight.data *= 1 + 0.2 * torch.randn_like(weight)
    ends = {name: special[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    model.generation_config = DiffusionGemmaGenerationConfig(**tiny.SAMPLER, **ends)
    model.save_pretrained(path)
    processor.save_pretrained(path)


def fresh_canvas(seed: int, start: int, canvas: int) -> torch.Tensor:
    """The canvas that a request with this seed begins with at this position."""
    keys = row_keys(torch.tensor([seed]), torch.tensor([start]), Stream.CANVAS)
    return uniform_tokens(keys, torch.arange(canvas), VOCABULARY)


class Reference:
    """transformers' model, one prompt at a time."""

    def __init__(self, path: Path, window: str = "reference") -> None:
        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
        self.canvas = self.model.config.canvas_length
        if window == "symmetric":
            decoder = self.model.model.decoder
            decoder.create_diffusion_decoder_attention_mask = self._symmetric

    def generate(self, prompt: list[int], seed: int, canvases: int, **sampler: Any) -> list[int]:
        """The tokens of some canvases; starting canvases are `fresh_canvas`."""
        prepare = type(self.model)._prepare_denoiser_inputs

        def with_canvas(*args: Any, **kwargs: Any) -> tuple:
            start = kwargs["past_key_values"].get_seq_length()
            kwargs["model_kwargs"]["decoder_input_ids"] = fresh_canvas(seed, start, self.canvas)
            return prepare(self.model, *args, **kwargs)

        self.model._prepare_denoiser_inputs = functools.wraps(prepare)(with_canvas)
        self.model.generation_config.eos_token_id = None
        out = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=canvases * self.canvas, **sampler
        )
        return out.sequences[0, len(prompt) :].tolist()

    def _symmetric(self, past_key_values: Any, **kwargs: Any) -> dict[str, torch.Tensor | None]:
        """|q - k| < W over the cached keys that a sliding layer keeps, and the canvas."""
        window = self.model.config.text_config.sliding_window
        start = past_key_values.get_seq_length()
        first = max(0, start - (window - 1))
        key = torch.arange(first, start + self.canvas)
        query = torch.arange(start, start + self.canvas)
        mask = (query[:, None] - key[None, :]).abs() < window
        return {"sliding_attention": mask[None, None], "full_attention": None}
