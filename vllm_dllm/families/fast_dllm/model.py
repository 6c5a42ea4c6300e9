"""Fast-dLLM v2 on vLLM's Qwen2 backbone; its weights have the same names."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.checkpoints.authors_tensors import shapes_of
from vllm_dllm.families.block_causal.model import MaskedCanvasModel
from vllm_dllm.families.fast_dllm.hf_config import FastDLLMConfig


class Fast_dLLM_QwenForCausalLM(MaskedCanvasModel, Qwen2ForCausalLM):  # noqa: N801
    """Loads exactly the tensors that a published checkpoint has.

    Raises:
        ValueError: the checkpoint's tensors are not those of this architecture.
    """

    released_as: ClassVar[str] = "Fast-dLLM v2"

    @staticmethod
    def is_linear(name: str) -> bool:
        """See `VerifiedWeights.is_linear`: not the head."""
        return name.endswith("_proj.weight")

    @classmethod
    def tensor_shapes(cls, config: FastDLLMConfig) -> dict[str, tuple[int, ...]]:
        """Those of transformers' Qwen2."""
        import transformers

        shapes = shapes_of(transformers.Qwen2ForCausalLM, config)
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        return shapes
