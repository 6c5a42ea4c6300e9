"""Stable-DiffCoder on vLLM's Llama backbone; its weights have the same names as Llama's."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_dllm.families.block_causal.model import TransformersTensors


class StableDiffcoderForCausalLM(TransformersTensors, LlamaForCausalLM):
    """Stable-DiffCoder, Base and Instruct."""

    released_as: ClassVar[str] = "Stable-DiffCoder"
    authors: ClassVar[str] = "LlamaForCausalLM"


class SeedDiffcoderForCausalLM(StableDiffcoderForCausalLM):
    """The same under the name of its first release."""
