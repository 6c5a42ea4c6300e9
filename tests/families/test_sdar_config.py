"""SDAR's configuration: the block length and the mask, and what is refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig
from vllm.transformers_utils.config import _maybe_register_hf_config

from tests.support.reference_sdar import MASK, VOCABULARY, random_checkpoint
from vllm_dllm.families.sdar.family import length_of_name
from vllm_dllm.families.sdar.hf_config import SDARConfig, SDARMoeConfig
from vllm_dllm.vllm_seams.registration import RefusedError, register_models


@pytest.mark.parametrize(
    ("model", "length"),
    [
        ("JetLM/SDAR-4B-Chat-b16", 16),
        ("/models/SDAR-1.7B-Chat-b64/", 64),
        ("/hub/models--JetLM--SDAR-8B-Chat-b32/snapshots/0b1c-b4x", 32),
        ("JetLM/SDAR-30B-A3B-Chat", None),
        ("SDAR-b5", None),
        ("SDAR-b160", None),
    ],
)
def test_the_block_length_of_a_published_name(model: str, length: int | None) -> None:
    assert length_of_name(model) == length


@pytest.mark.parametrize("config_class", [SDARConfig, SDARMoeConfig])
def test_the_block_length_of_a_configuration(config_class: Any) -> None:
    assert config_class().canvas_length == 4
    assert config_class(block_size=8).canvas_length == 8
    assert config_class(canvas_length=16).canvas_length == 16
    for length in (2.5, "8", True):
        with pytest.raises(StrictDataclassError, match="'block_size' expected int"):
            config_class(block_size=length)


def test_the_attention_of_training_is_not_selected() -> None:
    assert SDARConfig(attn_implementation="flex_attention")._attn_implementation is None


def test_qwen3_keeps_its_own_names() -> None:
    """A class that is registered under a second name would be renamed in the whole process."""
    register_models()
    for config_class in (SDARConfig, SDARMoeConfig):
        _maybe_register_hf_config(config_class())
    assert (Qwen3Config.model_type, Qwen3MoeConfig.model_type) == ("qwen3", "qwen3_moe")
    assert isinstance(AutoConfig.for_model("sdar"), SDARConfig)
    assert isinstance(AutoConfig.for_model("sdar_moe"), SDARMoeConfig)


def started(model: Path, **options: Any) -> Any:
    """vLLM's configuration of an engine that serves the checkpoint."""
    from vllm.engine.arg_utils import EngineArgs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngineArgs(model=str(model), **options).create_engine_config()


def changed(model: Path, **stated: Any) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text()) | stated
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "SDAR-tiny-b16", experts=False, block=8)


@pytest.mark.engine
def test_what_settles_the_block_length(model: Path) -> None:
    """An option, then a field, then the name, then 4."""
    asked = {"diffusion_config": {"canvas_length": 32}}
    assert started(model, **asked).diffusion_config.canvas_length == 32
    assert started(model).diffusion_config.canvas_length == 8
    changed(model, block_size=None)
    assert started(model).diffusion_config.canvas_length == 16
    unnamed = model.rename(model.with_name("SDAR-tiny"))
    assert started(unnamed).diffusion_config.canvas_length == 4


@pytest.mark.engine
def test_the_mask_is_the_tokenizers_where_the_checkpoint_states_none(model: Path) -> None:
    changed(model, mask_token_id=None)
    with pytest.raises(RefusedError, match=r"no mask token.*'<\|MASK\|>', '<MASK>'"):
        started(model)
    vocabulary = model / "tokenizer.json"
    text = vocabulary.read_text().replace(f'"t{MASK}"', '"<MASK>"')
    vocabulary.write_text(text)
    # Under another name, because a process keeps the tokenizers that it has read.
    renamed = model.rename(model.with_name("named"))
    assert started(renamed).model_config.hf_config.mask_token_id == MASK


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"mask_token_id": VOCABULARY}, "mask_token_id 300 is not a token id"),
        ({"mask_token_id": -1}, "mask_token_id -1 is not a token id"),
        ({"block_size": 0}, "block_size must be"),
        ({"model_type": "sdar_next"}, "sdar_next"),
        ({"use_regular_causal": True}, "use_regular_causal.*causal"),
        ({"attention_bias": True}, "attention_bias=True asks for a bias"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
    ],
)
def test_what_is_refused_by_name(model: Path, stated: dict[str, Any], words: str) -> None:
    changed(model, **stated)
    with pytest.raises(Exception, match=words):
        started(model)


@pytest.mark.engine
def test_recommended_sampling(model: Path) -> None:
    """Of ``generation_config.json``; a request that states nothing is greedy without it."""
    path = model / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert started(model).model_config.get_diff_sampling_param()["temperature"] == 0
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path.write_text(json.dumps({"eos_token_id": [1, 2], **recommended}))
    assert started(model).model_config.get_diff_sampling_param() == recommended
    unread = started(model, generation_config="vllm").model_config
    assert unread.get_diff_sampling_param() == {"temperature": 0}
