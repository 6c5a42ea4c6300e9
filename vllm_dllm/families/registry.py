"""Model families by architecture: built-in ones and those of installed packages."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from vllm_dllm.families.base import Family
from vllm_dllm.settings.server import native_gemma

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.dllm")

ENTRY_POINTS = "vllm_dllm.families"
GEMMA = "DiffusionGemmaForBlockDiffusion"
_SHARED = "transformers_models"
# For each architecture, the module of its family in this folder, the family's class there, and the
# module of the model's class, which is called like the architecture.
OURS = {
    "LLaDA2MoeModelLM": ("llada2.family", "LLaDA2", "llada2.model"),
    "LLaDA22MoeModelLM": ("llada2_2.family", "LLaDA22", "llada2_2.model"),
    GEMMA: ("diffusion_gemma.family", "DiffusionGemma", "diffusion_gemma.model"),
    "SDARForCausalLM": ("sdar", "SDAR", _SHARED),
    "SDARMoeForCausalLM": ("sdar", "SDARMoe", _SHARED),
    "StableDiffcoderForCausalLM": ("stable_diffcoder", "StableDiffCoder", _SHARED),
    "SeedDiffcoderForCausalLM": ("stable_diffcoder", "StableDiffCoder", _SHARED),
    "NemotronLabsDiffusionModel": ("nemotron_labs_diffusion", "NemotronLabsDiffusion", _SHARED),
    "MinistralDiffEncoderModel": ("nemotron_labs_diffusion", "MinistralDiffEncoder", _SHARED),
    "NemotronLabsDiffusionVLMModel": ("nemotron_labs_diffusion", "NemotronVLM", "vision.models"),
    "SDARVForConditionalGeneration": ("sdar", "SDARVL", "vision.models"),
    "Fast_dLLM_QwenForCausalLM": ("fast_dllm", "FastDLLM", _SHARED),
    "DreamForCausalLM": ("dream_reasoner", "DreamReasoner", _SHARED),
    "OpenPanguDiffusionForCausalLM": ("openpangu", "OpenPangu", _SHARED),
}
# The configuration classes that transformers lacks, by ``model_type``.
CONFIGS = {
    "llada2_moe": ("llada2.family", "LLaDA2MoeConfig"),
    "sdar": ("sdar", "SDARConfig"),
    "sdar_moe": ("sdar", "SDARMoeConfig"),
    "nemotron_labs_diffusion": ("nemotron_labs_diffusion", "NemotronLabsDiffusionConfig"),
    "ministral_dlm": ("nemotron_labs_diffusion", "MinistralDLMConfig"),
    "nemotron_labs_diffusion_vlm": ("nemotron_labs_diffusion", "NemotronLabsDiffusionVLMConfig"),
    "sdar_v": ("sdar", "SDARVConfig"),
    "llava_onevision": ("sdar", "OneVisionConfig"),
    "Fast_dLLM_Qwen": ("fast_dllm", "FastDLLMConfig"),
    "Dream": ("dream_reasoner", "DreamConfig"),
    "PanguEmbedded": ("openpangu", "PanguEmbeddedConfig"),
}


@cache
def family(architecture: str) -> Family:
    """The family of an architecture, which is imported now if it is one of `OURS`."""
    if architecture not in OURS:
        return installed()[architecture]
    module, name, _ = OURS[architecture]
    found: Family = getattr(importlib.import_module(f"vllm_dllm.families.{module}"), name)()
    return found


@cache
def installed() -> Mapping[str, Family]:
    """The families of other packages, by architecture.

    A package whose family cannot be loaded is skipped with a warning: the others still serve.
    Raises ValueError if two families claim an architecture.
    """
    found: dict[str, Family] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            one: Family = point.load()()
            architecture = one.architecture
        except Exception as error:
            logger.warning(
                f"dllm: the family {point.name!r} ({point.value}) cannot be loaded: {error!r}"
            )
            continue
        if architecture in OURS or architecture in found:
            raise ValueError(f"{architecture} is claimed by two families, also {point.value}")
        found[architecture] = one
    return found


def model_class(architecture: str) -> str:
    """``module:Class`` of the model, which vLLM imports when it loads one."""
    if architecture in OURS:
        return f"vllm_dllm.families.{OURS[architecture][2]}:{architecture}"
    return installed()[architecture].model_class


def architectures() -> tuple[str, ...]:
    """The architectures of all families."""
    return (*OURS, *installed())


def served_architectures() -> tuple[str, ...]:
    """Those that are served here: ``VLLM_DLLM_NATIVE=1`` leaves DiffusionGemma to vLLM's class."""
    left = GEMMA if native_gemma() else None
    return tuple(each for each in architectures() if each != left)


def family_of(vllm_config: VllmConfig) -> Family:
    """The family of the model that is being served."""
    return family(vllm_config.model_config.architecture)
