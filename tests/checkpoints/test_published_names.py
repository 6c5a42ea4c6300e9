"""Each tensor of a published index fills exactly one parameter, and no parameter stays empty."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from benchmarks.model_memory import Weights, float8, int4, parameter_bytes, unquantized
from benchmarks.published import DIFFUSION_GEMMA, NEMOTRON_14B, SHAPES, Geometry
from tests.support.engine import answers_of_child
from tests.support.published import (
    DIFFCODER,
    FAST_DLLM,
    GEMMA,
    GEMMA_VISION,
    LLADA2,
    NEMOTRON,
    SDAR,
    diffcoder_config,
    fast_dllm_config,
    gemma_tensors,
    is_matrix,
    llada2_config,
    llada2_tensors,
    nemotron_config,
    nemotron_tensors,
    one_by_one,
    sdar_config,
    sdar_tensors,
    tensors_of,
)
from vllm_dllm.families.fast_dllm.hf_config import FastDLLMConfig
from vllm_dllm.families.fast_dllm.model import Fast_dLLM_QwenForCausalLM
from vllm_dllm.families.llada2.hf_config import LLaDA2MoeConfig
from vllm_dllm.families.llada2.model import LLaDA2MoeModelLM
from vllm_dllm.families.nemotron_labs_diffusion.hf_config import NemotronLabsDiffusionConfig
from vllm_dllm.families.nemotron_labs_diffusion.model import NemotronLabsDiffusionModel
from vllm_dllm.families.sdar.hf_config import SDARConfig, SDARMoeConfig
from vllm_dllm.families.sdar.model import SDARForCausalLM, SDARMoeForCausalLM
from vllm_dllm.families.stable_diffcoder.model import StableDiffcoderForCausalLM

CASES = {
    "llada2-mini": (None, "w4a16"),
    "llada2-flash": (None, "fp8-dynamic"),
    "llada2.2-flash": (None, "fp8-dynamic"),
    GEMMA: (None, "nvfp4"),
    "sdar-1.7b-chat": (None, "int8"),
    "sdar-30b-a3b-chat": (None, "w4a16"),
    DIFFCODER: (None,),
    "nemotron-labs-diffusion-14b": (None, "fp8-dynamic"),
    FAST_DLLM: (None, "int8"),
}
# Their memory is that of docs/models.md.
GEOMETRIES: dict[str, Geometry] = {
    "llada2-mini": SHAPES["LLaDA2.x-mini"],
    "llada2-flash": SHAPES["LLaDA2.x-flash"],
    "llada2.2-flash": SHAPES["LLaDA2.x-flash"],
    # Of the vision tower a bias and a scale are buffers.
    GEMMA: replace(
        DIFFUSION_GEMMA, vision=DIFFUSION_GEMMA.vision - 2 * GEMMA_VISION["hidden_size"]
    ),
    "sdar-1.7b-chat": SHAPES["SDAR-1.7B"],
    "sdar-30b-a3b-chat": SHAPES["SDAR-30B-A3B"],
    DIFFCODER: SHAPES["Stable-DiffCoder-8B"],
    "nemotron-labs-diffusion-14b": NEMOTRON_14B,
}
WEIGHTS: dict[str | None, Weights] = {
    None: unquantized(),
    "fp8-dynamic": float8(),
    "w4a16": int4(128),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("which", list(CASES))
def test_every_name_has_one_place(which: str) -> None:
    reports: list[dict[str, Any]] = answers_of_child("names_child", which, *CASES[which])
    assert [report["scheme"] for report in reports] == list(CASES[which])
    for report in reports:
        assert report["tensors"] > 250
        assert not report["astray"], (which, report["scheme"])
        assert not report["unfilled"], (which, report["scheme"])
        if report["scheme"] in WEIGHTS and which in GEOMETRIES:
            weights = WEIGHTS[report["scheme"]]
            assert report["bytes"] == parameter_bytes(GEOMETRIES[which], weights)


@pytest.mark.parametrize("which", list(LLADA2))
def test_the_loader_expects_what_is_published(which: str) -> None:
    config = LLaDA2MoeConfig(**llada2_config(which))
    assert LLaDA2MoeModelLM.tensor_shapes(config) == llada2_tensors(which)


@pytest.mark.parametrize("which", list(SDAR))
def test_the_loader_expects_qwen3s_tensors(which: str) -> None:
    stated = sdar_config(which)
    if stated.pop("model_type") == "sdar_moe":
        found = SDARMoeForCausalLM.tensor_shapes(SDARMoeConfig(**stated))
    else:
        found = SDARForCausalLM.tensor_shapes(SDARConfig(**stated))
    assert found == sdar_tensors(which)


def test_the_loader_expects_llamas_tensors() -> None:
    found = StableDiffcoderForCausalLM.tensor_shapes(LlamaConfig(**diffcoder_config()))
    assert found == tensors_of(DIFFCODER)


@pytest.mark.parametrize("which", list(NEMOTRON))
def test_the_loader_expects_the_authors_names(which: str) -> None:
    stated = nemotron_config(which)
    del stated["model_type"]
    config = NemotronLabsDiffusionConfig(**stated)
    assert NemotronLabsDiffusionModel.tensor_shapes(config) == nemotron_tensors(which)
    assert len(nemotron_tensors("nemotron-labs-diffusion-14b")) == 363


def test_the_loader_expects_qwen2s_tensors() -> None:
    stated = fast_dllm_config()
    del stated["model_type"]
    wanted = tensors_of(FAST_DLLM)
    assert Fast_dLLM_QwenForCausalLM.tensor_shapes(FastDLLMConfig(**stated)) == wanted
    tied = FastDLLMConfig(**stated | {"tie_word_embeddings": True})
    del wanted["lm_head.weight"]
    assert Fast_dLLM_QwenForCausalLM.tensor_shapes(tied) == wanted


def test_a_published_checkpoint_quantizes_as_many_matrices() -> None:
    """11,725 is what the page of a published INT8 checkpoint of DiffusionGemma counts."""
    tensors = one_by_one(gemma_tensors())
    assert sum(is_matrix(name, shape) for name, shape in tensors.items()) == 11_725
