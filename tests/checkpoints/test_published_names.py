"""The loaders expect the tensors of published indexes."""

from __future__ import annotations

import math

import pytest
from transformers import LlamaConfig

from tests.support.published import (
    LLADA2,
    NEMOTRON,
    SDAR,
    diffcoder_config,
    dream_config,
    fast_dllm_config,
    gemma_tensors,
    is_matrix,
    llada2_config,
    llada2_tensors,
    named_by_transformers,
    nemotron_config,
    nemotron_tensors,
    one_by_one,
    openpangu_config,
    sdar_config,
    sdar_tensors,
)
from vllm_dllm.families.dream_reasoner import DreamConfig
from vllm_dllm.families.fast_dllm import FastDLLMConfig
from vllm_dllm.families.llada2.family import LLaDA2MoeConfig
from vllm_dllm.families.llada2.model import LLaDA2MoeModelLM
from vllm_dllm.families.nemotron_labs_diffusion import NemotronLabsDiffusionConfig
from vllm_dllm.families.openpangu import PanguEmbeddedConfig
from vllm_dllm.families.sdar import SDARConfig, SDARMoeConfig, SDARVConfig
from vllm_dllm.families.transformers_models import (
    DreamForCausalLM,
    Fast_dLLM_QwenForCausalLM,
    NemotronLabsDiffusionModel,
    OpenPanguDiffusionForCausalLM,
    SDARForCausalLM,
    SDARMoeForCausalLM,
    StableDiffcoderForCausalLM,
)
from vllm_dllm.families.vision.models import SDARVForConditionalGeneration


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
    stated = diffcoder_config()
    found = StableDiffcoderForCausalLM.tensor_shapes(LlamaConfig(**stated))
    assert found == named_by_transformers("Llama", stated)


@pytest.mark.parametrize("which", list(NEMOTRON))
def test_the_loader_expects_the_authors_names(which: str) -> None:
    stated = nemotron_config(which)
    del stated["model_type"]
    config = NemotronLabsDiffusionConfig(**stated)
    assert NemotronLabsDiffusionModel.tensor_shapes(config) == nemotron_tensors(which)
    assert len(nemotron_tensors("nemotron-labs-diffusion-14b")) == 363


def test_the_loader_expects_qwen2s_tensors() -> None:
    stated = fast_dllm_config()
    wanted = named_by_transformers("Qwen2", stated)
    del stated["model_type"]
    assert Fast_dLLM_QwenForCausalLM.tensor_shapes(FastDLLMConfig(**stated)) == wanted
    tied = FastDLLMConfig(**stated | {"tie_word_embeddings": True})
    del wanted["lm_head.weight"]
    assert Fast_dLLM_QwenForCausalLM.tensor_shapes(tied) == wanted


def test_the_loader_expects_the_tensors_of_two_more() -> None:
    """Of Qwen3, whose heads are a share of the hidden size, and of Llama with four biases."""
    stated = dream_config()
    wanted = named_by_transformers("Qwen3", stated | {"head_dim": 128})
    del stated["model_type"]
    assert DreamForCausalLM.tensor_shapes(DreamConfig(**stated)) == wanted
    stated = openpangu_config()
    wanted = named_by_transformers("Llama", stated | {"attention_bias": True})
    assert sum(name.endswith("_proj.bias") for name in wanted) == 4 * 34
    del stated["model_type"]
    config = PanguEmbeddedConfig(**stated | {"mask_token_id": 45830})
    assert OpenPanguDiffusionForCausalLM.tensor_shapes(config) == wanted


def test_the_loader_expects_as_much_as_sdar_vls_index() -> None:
    """Its total size, without a norm of the tower that no feature passes."""
    text = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    tower |= {"num_attention_heads": 16, "image_size": 384, "patch_size": 14}
    config = SDARVConfig(text_config=text | {"vocab_size": 151936}, vision_config=tower)
    found = SDARVForConditionalGeneration.tensor_shapes(config)
    assert 2 * sum(map(math.prod, found.values())) == 9_667_843_808 - 2 * 2 * 1152


def test_a_published_checkpoint_quantizes_as_many_matrices() -> None:
    """11,725 is what the page of a published INT8 checkpoint of DiffusionGemma counts."""
    tensors = one_by_one(gemma_tensors())
    assert sum(is_matrix(name, shape) for name, shape in tensors.items()) == 11_725
