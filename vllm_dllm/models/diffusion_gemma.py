"""DiffusionGemma on vLLM's own class: same weights, same backbone, another head and sampler.

`compute_logits` passes hidden states through; `tiled_head` gives the sampler the head and
the embedding a tile of the vocabulary at a time, so that logits never exist as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.diffusion_gemma import DiffusionGemmaForConditionalGeneration

from vllm_dllm.models.checkpoint import HEAD, verified
from vllm_dllm.ops.tiled_stats import Head, Shard

if TYPE_CHECKING:
    from vllm_dllm.engine.model_state import DiffusionModelState


class DiffusionGemmaForBlockDiffusion(DiffusionGemmaForConditionalGeneration):
    """google/diffusiongemma-*: text and images in, text out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.quantized = vllm_config.quant_config is not None
        self.first_id = 0  # of this rank's shard of the head

    @staticmethod
    def get_model_state_cls() -> type[DiffusionModelState]:
        """The hook through which vLLM's runner takes our request state and sampler."""
        from vllm_dllm.engine.model_state import DiffusionModelState

        return DiffusionModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states, unchanged: the sampler owns the head."""
        return hidden_states

    def tiled_head(self) -> Head:
        """The head and the embedding that self-conditioning averages, by ranges of ids.

        Raises:
            ValueError: the head is quantized, so that its weight is no plain matrix.
        """
        if not isinstance(self.lm_head.quant_method, UnquantizedEmbeddingMethod):
            raise ValueError(
                "a quantized lm_head is not supported for DiffusionGemma; leave lm_head out of "
                "the quantization, or set VLLM_DLLM_NATIVE=1"
            )
        own = self.lm_head.shard_indices
        self.first_id, end = own.org_vocab_start_index, own.org_vocab_end_index
        # vLLM pads the rows of the embedding.
        embedding = self.model.embed_tokens.weight[: max(0, end - self.first_id)]
        shard = None
        if get_tensor_model_parallel_world_size() > 1:
            width = self.lm_head.num_embeddings_per_partition
            shard = Shard(self.first_id, end, width, _gather, tensor_model_parallel_all_reduce)
        return Head(self.logits, self.vocabulary, embedding, shard)

    def logits(self, hidden_states: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Float32 logits ``[rows, end - first]`` of hidden states ``[rows, hidden]``.

        The ids are absolute, and of this rank's shard. The soft cap is applied in float32, as
        the authors do.
        """
        weight = self.lm_head.weight[first - self.first_id : end - self.first_id]
        logits = torch.nn.functional.linear(hidden_states, weight).float()
        cap = self.final_logit_softcapping
        if cap is None:
            return logits
        return logits.div_(cap).tanh_().mul_(cap)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint; name the first tensor that does not belong."""
        if not self.quantized:
            weights = verified(
                weights, tensor_shapes(self.config), "DiffusionGemma", one_name=_one_name
            )
        return super().load_weights(weights)


def _gather(part: torch.Tensor) -> torch.Tensor:
    """``[...]`` of this rank to ``[ranks, ...]``."""
    return tensor_model_parallel_all_gather(part[None].contiguous(), dim=0)


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
