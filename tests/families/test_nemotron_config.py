"""Nemotron-Labs-Diffusion's configuration: what follows from it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Ministral3Config

from tests.families.test_sdar_config import changed, started
from tests.support.reference_nemotron import MASK, random_checkpoint
from vllm_dllm.families.nemotron_labs_diffusion.hf_config import (
    MinistralDLMConfig,
    NemotronLabsDiffusionConfig,
)
from vllm_dllm.families.registry import family
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings
from vllm_dllm.vllm_seams.registration import RefusedError, register_models

ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0}
ROPE |= {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}


def test_the_block_length() -> None:
    assert NemotronLabsDiffusionConfig().canvas_length == 32
    assert NemotronLabsDiffusionConfig(block_size=8).canvas_length == 8
    assert NemotronLabsDiffusionConfig(canvas_length=16).canvas_length == 16


def test_what_the_rope_parameters_imply() -> None:
    """The attention factor is 1 although a scale is left out, and queries grow as in Llama 4."""
    config = NemotronLabsDiffusionConfig(rope_parameters=dict(ROPE))
    assert config.rope_parameters["attention_factor"] == 1.0
    assert config.llama_4_scaling == {"beta": 0.1, "original_max_position_embeddings": 16384}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert NemotronLabsDiffusionConfig(rope_parameters=plain).llama_4_scaling is None


def test_the_names_of_the_configurations() -> None:
    register_models()
    from vllm.transformers_utils.config import _maybe_register_hf_config

    for config_class in (NemotronLabsDiffusionConfig, MinistralDLMConfig):
        _maybe_register_hf_config(config_class())
    assert isinstance(AutoConfig.for_model("nemotron_labs_diffusion"), NemotronLabsDiffusionConfig)
    assert isinstance(AutoConfig.for_model("ministral_dlm"), MinistralDLMConfig)
    assert Ministral3Config.model_type == "ministral3"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "model", block=8)


@pytest.mark.engine
def test_what_is_served(model: Path) -> None:
    chosen = started(model)
    assert chosen.diffusion_config.canvas_length == 8
    assert chosen.model_config.dllm.mask_token == MASK
    assert chosen.model_config.dllm.choose().algorithm.name == "ConfidenceThreshold"
    assert chosen.model_config.dllm.choose().settings.values() == {"threshold": 0.9}
    # Canvases begin anywhere, so the context need not consist of whole blocks.
    assert started(model, max_model_len=101).model_config.max_model_len == 101
    asked = {"diffusion_config": {"canvas_length": 32}}
    assert started(model, **asked).diffusion_config.canvas_length == 32
    other = started(model, hf_overrides={"mask_token_id": 7})
    assert other.model_config.dllm.mask_token == 7
    changed(model, mask_token_id=None)
    assert started(model).model_config.dllm.mask_token == 100


@pytest.mark.engine
def test_an_older_checkpoint(model: Path) -> None:
    changed(model, model_type="ministral_dlm", architectures=["MinistralDiffEncoderModel"])
    assert started(model).model_config.architecture == "MinistralDiffEncoderModel"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"model_type": "nemotron_labs_diffusion_vlm"}, "pictures are not served"),
        ({"mask_token_id": -1}, "mask_token_id -1 is not a token id"),
        ({"block_size": 0}, "block_size must be"),
        ({"dlm_paradigm": "autoregressive"}, "dlm_paradigm='autoregressive' asks for"),
        ({"ar_mode": True}, "ar_mode=True asks for .* LinearSpec"),
        ({"attention_bias": True}, "attention_bias=True asks for a bias"),
        ({"sliding_window": 64}, "sliding_window"),
    ],
)
def test_what_is_refused_by_name(model: Path, stated: dict[str, Any], words: str) -> None:
    changed(model, **stated)
    with pytest.raises(Exception, match=words):
        started(model)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"additional_config": {"dllm": {"fused_commit": "on"}}}, "different masks"),
        ({"additional_config": {"dllm": {"window": "reference"}}}, "dllm.window"),
        ({"additional_config": {"dllm": {"kernels": "triton"}}}, "dllm.kernels=triton"),
    ],
)
def test_options_that_cannot_work(model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        started(model, **options)


@pytest.mark.parametrize("architecture", ["LLaDA2MoeModelLM", "SDARForCausalLM"])
def test_other_families_have_no_causal_pass(architecture: str) -> None:
    """Refused for a server and for a request, and no harm done by its presence."""
    other = family(architecture)
    asked = Served("mask", other.algorithm, DllmSettings(), verifies=other.verifies)
    with pytest.raises(SettingsError, match="diffusion_algorithm: LinearSpec verifies its drafts"):
        asked.choose({"algorithm": "LinearSpec"})
    server = Served("mask", other.algorithm, DllmSettings(algorithm="LinearSpec"))
    with pytest.raises(SettingsError, match=r"dllm\.algorithm: LinearSpec verifies its drafts"):
        server.choose()


def test_a_server_of_linear_spec() -> None:
    served = Served("mask", "LowConfidence", DllmSettings(algorithm="LinearSpec"), verifies=True)
    assert served.choose().settings.values() == {"threshold": 0.0}


def test_json_of_the_configuration_is_that_of_a_checkpoint() -> None:
    """What transformers writes for a fine-tuned variant is read again."""
    config = NemotronLabsDiffusionConfig(rope_parameters=dict(ROPE), block_size=16)
    stated = json.loads(config.to_json_string(use_diff=False))
    again = NemotronLabsDiffusionConfig(**stated)
    assert (again.canvas_length, again.llama_4_scaling) == (16, config.llama_4_scaling)
