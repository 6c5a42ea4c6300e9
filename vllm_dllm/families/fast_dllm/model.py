"""Fast-dLLM v2 on vLLM's Qwen2 backbone; its weights have the same names."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.families.block_causal.model import TransformersTensors


class Fast_dLLM_QwenForCausalLM(TransformersTensors, Qwen2ForCausalLM):  # noqa: N801
    """Fast-dLLM v2, 1.5B and 7B."""

    released_as: ClassVar[str] = "Fast-dLLM v2"
    authors: ClassVar[str] = "Qwen2ForCausalLM"
