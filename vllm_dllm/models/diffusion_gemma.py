"""DiffusionGemma on vLLM's own class: same weights, same backbone, another head and sampler.

`compute_logits` passes hidden states through; `tiled_head` gives the sampler the head and
the embedding a tile of the vocabulary at a time, so that logits never exist as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.diffusion_gemma import DiffusionGemmaForConditionalGeneration

from vllm_dllm.models.checkpoint import HEAD, verified
from vllm_dllm.models.tiled_head import tiled_head
from vllm_dllm.ops.tiled_stats import Head

if TYPE_CHECKING:
    from vllm_dllm.engine.model_state import DiffusionModelState


class DiffusionGemmaForBlockDiffusion(DiffusionGemmaForConditionalGeneration):
    """google/diffusiongemma-*: text and images in, text out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.quantized = vllm_config.quant_config is not None

    @staticmethod
    def get_model_state_cls() -> type[DiffusionModelState]:
        """The hook through which vLLM's runner takes our request state and sampler."""
        from vllm_dllm.engine.model_state import DiffusionModelState

        return DiffusionModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states, unchanged: the sampler owns the head."""
        return hidden_states

    def tiled_head(self) -> Head:
        """The head, and the embedding that self-conditioning averages; see `models.tiled_head`."""
        embedding = self.model.embed_tokens.weight
        return tiled_head(self.lm_head, self.vocabulary, embedding, self.final_logit_softcapping)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint; name the first tensor that does not belong."""
        if not self.quantized:
            weights = verified(
                weights, tensor_shapes(self.config), "DiffusionGemma", one_name=_one_name
            )
        return super().load_weights(weights)


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor of an unquantized checkpoint, as transformers' class would have it.

    Encoder and decoder share their weights and a checkpoint may carry either name or both,
    so each stands here once, under the name that `_one_name` gives it.
    """
    from transformers import DiffusionGemmaForBlockDiffusion as Authors

    with torch.device("meta"):
        tensors = Authors(config).state_dict()
    shapes = {_one_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        shapes.pop(HEAD, None)
    return {name: shape for name, shape in shapes.items() if name is not None}


def _one_name(name: str) -> str | None:
    """One name for both copies of a shared tensor; None for what vLLM's loader passes over."""
    if "embed_vision.embedding." in name:
        return None
    for half in ("model.decoder.", "model.encoder.language_model."):
        if name.startswith(half):
            return "model." + name.removeprefix(half)
    return name
