"""Stable-DiffCoder's configuration: every published field, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.families.test_sdar_config import changed, started
from tests.support.published import diffcoder_config
from tests.support.reference_diffcoder import BLOCK, MASK, random_checkpoint
from vllm_dllm.families.stable_diffcoder.family import StableDiffCoder
from vllm_dllm.vllm_seams.registration import RefusedError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "model")


def test_a_published_checkpoint_is_taken_without_a_word() -> None:
    stated = diffcoder_config()
    assert StableDiffCoder.fields.ignored(stated, {}) == []
    assert LlamaConfig(**stated).rope_parameters["rope_theta"] == 5e5
    assert StableDiffCoder.fields.ignored({"num_experts": 8}, {}) == ["num_experts"]


@pytest.mark.engine
def test_what_settles_the_block_length(model: Path) -> None:
    """An option, then a field, then 4; by that vLLM knows a diffusion model."""
    config = started(model)
    assert config.model_config.is_diffusion
    assert config.diffusion_config.canvas_length == BLOCK
    choice = config.model_config.dllm.choose()
    assert choice.algorithm.name == "ConfidenceThreshold"
    assert choice.settings.values() == {"threshold": 0.95}
    asked = {"diffusion_config": {"canvas_length": 16}}
    assert started(model, **asked).diffusion_config.canvas_length == 16
    overridden = started(model, hf_overrides={"block_length": 2})
    assert overridden.diffusion_config.canvas_length == 2
    changed(model, block_size=8)
    assert started(model).diffusion_config.canvas_length == 8


@pytest.mark.engine
def test_what_settles_the_mask(tmp_path: Path, model: Path) -> None:
    """A field, then the tokenizer, then the authors' number."""
    assert started(model).model_config.hf_config.mask_token_id == MASK
    asked = {"hf_overrides": {"mask_token_id": 7}}
    assert started(model, **asked).model_config.hf_config.mask_token_id == 7
    changed(model, mask_token_id=9)
    assert started(model).model_config.hf_config.mask_token_id == 9
    changed(model, mask_token_id=None)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words, tokenizer["added_tokens"] = tokenizer["model"]["vocab"], []
    spelling = "<[MASK_TOKEN]>"
    # A process keeps the tokenizers that it has read, so each has a folder of its own.
    for folder, old, new in (("unspelled", spelling, "t5"), ("elsewhere", "t299", spelling)):
        words[new] = words.pop(old)
        model = model.rename(tmp_path / folder)
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert started(model).model_config.hf_config.mask_token_id == words[new]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"mask_token_id": 300}, "mask_token_id 300 is not a token id"),
        ({"block_size": 0}, "block_size must be"),
        ({"block_size": "8"}, "block_size must be"),
        ({"is_causal": False}, "is_causal=False asks for"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' asks for"),
        ({"qkv_bias": True}, "qkv_bias=True asks for a bias"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types=.* asks for layers"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 asks for scaled logits"),
    ],
)
def test_what_is_refused_by_name(model: Path, stated: dict[str, Any], words: str) -> None:
    changed(model, **stated)
    with pytest.raises(RefusedError, match=words):
        started(model)


@pytest.mark.engine
def test_a_vocabulary_without_the_authors_mask(tmp_path: Path) -> None:
    small = random_checkpoint(tmp_path / "model", vocab_size=4)
    with pytest.raises(RefusedError, match=r"mask_token_id 5 is not a token id in \[0, 4\)"):
        started(small, skip_tokenizer_init=True)


@pytest.mark.engine
def test_llama_stays_what_it_is(model: Path) -> None:
    changed(model, architectures=["LlamaForCausalLM"], auto_map=None)
    assert not started(model).model_config.is_diffusion
