"""SDAR on vLLM's Qwen3 and Qwen3-MoE backbones; its weights have the same names as theirs."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_dllm.checkpoints.authors_tensors import one_by_one, shapes_of
from vllm_dllm.families.block_causal.model import MaskedCanvasModel
from vllm_dllm.families.sdar.hf_config import SDARConfig, SDARMoeConfig


class _Verified(MaskedCanvasModel):
    """Loads exactly the tensors that a published checkpoint has.

    Raises:
        ValueError: the checkpoint's tensors are not those of this architecture.
    """

    released_as: ClassVar[str] = "SDAR"

    @staticmethod
    def is_linear(name: str) -> bool:
        """See `VerifiedWeights.is_linear`: not the router or head."""
        return name.endswith("_proj.weight")

    @classmethod
    def tensor_shapes(cls, config: SDARConfig | SDARMoeConfig) -> dict[str, tuple[int, ...]]:
        """Those of transformers' Qwen3, with each expert's matrices stored separately."""
        import transformers

        authors = (
            transformers.Qwen3MoeForCausalLM
            if isinstance(config, SDARMoeConfig)
            else transformers.Qwen3ForCausalLM
        )
        shapes = one_by_one(shapes_of(authors, config))
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        return shapes


class SDARForCausalLM(_Verified, Qwen3ForCausalLM):
    """SDAR's dense models, TraDo and DiRL."""


class SDARMoeForCausalLM(_Verified, Qwen3MoeForCausalLM):
    """SDAR's models with experts."""
