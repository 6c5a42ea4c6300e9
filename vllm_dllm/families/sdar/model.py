"""SDAR on vLLM's Qwen3 and Qwen3-MoE backbones; its weights have the same names as theirs."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_dllm.families.block_causal.model import TransformersTensors


class SDARForCausalLM(TransformersTensors, Qwen3ForCausalLM):
    """SDAR's dense models, TraDo and DiRL."""

    released_as: ClassVar[str] = "SDAR"
    authors: ClassVar[str] = "Qwen3ForCausalLM"


class SDARMoeForCausalLM(TransformersTensors, Qwen3MoeForCausalLM):
    """SDAR's models with experts."""

    released_as: ClassVar[str] = "SDAR"
    authors: ClassVar[str] = "Qwen3MoeForCausalLM"
