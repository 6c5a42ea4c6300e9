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
# The folder of each built-in family beside this file, and its class in `family.py` there, which is
# imported when it is asked for. The model's class, in `model.py`, is called like the architecture.
OURS = {
    "LLaDA2MoeModelLM": ("llada2", "LLaDA2"),
    "LLaDA22MoeModelLM": ("llada2_2", "LLaDA22"),
    GEMMA: ("diffusion_gemma", "DiffusionGemma"),
    "SDARForCausalLM": ("sdar", "SDAR"),
    "SDARMoeForCausalLM": ("sdar", "SDARMoe"),
    "StableDiffcoderForCausalLM": ("stable_diffcoder", "StableDiffCoder"),
    "SeedDiffcoderForCausalLM": ("stable_diffcoder", "StableDiffCoder"),
    "NemotronLabsDiffusionModel": ("nemotron_labs_diffusion", "NemotronLabsDiffusion"),
    "MinistralDiffEncoderModel": ("nemotron_labs_diffusion", "MinistralDiffEncoder"),
    "Fast_dLLM_QwenForCausalLM": ("fast_dllm", "FastDLLM"),
}
# The configuration classes that transformers lacks, in `hf_config.py`, by ``model_type``.
CONFIGS = {
    "llada2_moe": ("llada2", "LLaDA2MoeConfig"),
    "sdar": ("sdar", "SDARConfig"),
    "sdar_moe": ("sdar", "SDARMoeConfig"),
    "nemotron_labs_diffusion": ("nemotron_labs_diffusion", "NemotronLabsDiffusionConfig"),
    "ministral_dlm": ("nemotron_labs_diffusion", "MinistralDLMConfig"),
    "nemotron_labs_diffusion_vlm": (
        "nemotron_labs_diffusion",
        "NemotronLabsDiffusionVLMConfig",
    ),
    "Fast_dLLM_Qwen": ("fast_dllm", "FastDLLMConfig"),
}


@cache
def family(architecture: str) -> Family:
    """The family of an architecture, which is imported now if it is one of `OURS`."""
    if architecture not in OURS:
        return installed()[architecture]
    folder, name = OURS[architecture]
    found: Family = getattr(importlib.import_module(f"vllm_dllm.families.{folder}.family"), name)()
    return found


@cache
def installed() -> Mapping[str, Family]:
    """The families of other packages, by architecture.

    A package whose family cannot be loaded is skipped with a warning: the others still serve.

    Raises:
        ValueError: two families claim an architecture.
    """
    found: dict[str, Family] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            one: Family = point.load()()
            architecture = one.architecture
        except Exception as error:
            logger.warning(
                "dllm: the family %r (%s) cannot be loaded: %r", point.name, point.value, error
            )
            continue
        if architecture in OURS or architecture in found:
            raise ValueError(
                f"{architecture} is claimed by two families, one of which is {point.value}"
            )
        found[architecture] = one
    return found


def model_class(architecture: str) -> str:
    """``module:Class`` of the model, which vLLM imports when it loads one."""
    if architecture in OURS:
        return f"vllm_dllm.families.{OURS[architecture][0]}.model:{architecture}"
    return installed()[architecture].model_class


def architectures() -> tuple[str, ...]:
    """The architectures of all families."""
    return (*OURS, *installed())


def served_architectures() -> tuple[str, ...]:
    """The architectures that this package serves in this environment.

    ``VLLM_DLLM_NATIVE=1`` leaves DiffusionGemma to vLLM's own class.
    """
    left = GEMMA if native_gemma() else None
    return tuple(each for each in architectures() if each != left)


def family_of(vllm_config: VllmConfig) -> Family:
    """The family of the model that is being served."""
    return family(vllm_config.model_config.architecture)
