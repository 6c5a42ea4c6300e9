"""DiffusionGemma on vLLM's own class: same weights, same backbone, another head and sampler.

`compute_logits` passes hidden states through; `tiled_head` gives the sampler the head and
the embedding a tile of the vocabulary at a time, so that logits never exist as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.diffusion_gemma import DiffusionGemmaForConditionalGeneration

from vllm_dllm.ops.sampled_stats import Head

if TYPE_CHECKING:
    from vllm_dllm.engine.model_state import DiffusionModelState


class DiffusionGemmaForBlockDiffusion(DiffusionGemmaForConditionalGeneration):
    """google/diffusiongemma-*: text and images in, text out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vocabulary = vllm_config.model_config.get_vocab_size()

    @staticmethod
    def get_model_state_cls() -> type[DiffusionModelState]:
        """The hook through which vLLM's runner takes our request state and sampler."""
        from vllm_dllm.engine.model_state import DiffusionModelState

        return DiffusionModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states, unchanged: the sampler owns the head."""
        return hidden_states

    def tiled_head(self) -> Head:
        """The head and the embedding that self-conditioning averages, by ranges of ids."""
        return Head(self.logits, self.vocabulary, self.model.embed_tokens.weight)

    def logits(self, hidden_states: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Float32 logits ``[rows, end - first]`` of hidden states ``[rows, hidden]``.

        The soft cap is applied in float32, as the authors do.
        """
        weight = self.lm_head.weight[first:end]
        logits = torch.nn.functional.linear(hidden_states, weight).float()
        cap = self.final_logit_softcapping
        if cap is None:
            return logits
        return logits.div_(cap).tanh_().mul_(cap)
