"""What real checkpoints leave out of ``config.json``."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassError

from vllm_dllm.families.llada2.hf_config import LLaDA2MoeConfig


def test_missing_keys_take_the_authors_values() -> None:
    config = LLaDA2MoeConfig(hidden_size=2048, num_attention_heads=16, head_dim=128)
    assert config.use_qk_norm, "vLLM's BailingMoeV2 would assume false"
    assert config.mask_token_id is None
    assert config.canvas_length == 32
    assert config.partial_rotary_factor == 0.5
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"block_length": 8}, 8),
        ({"canvas_length": 16}, 16),
        ({"block_length": 8, "canvas_length": 8}, 8),
    ],
)
def test_block_length_of_a_checkpoint(given: dict[str, int], length: int) -> None:
    assert LLaDA2MoeConfig(**given).canvas_length == length


def test_another_architecture_is_no_diffusion_model() -> None:
    """`benchmarks/serve.py` serves the weights as a causal model."""
    config = LLaDA2MoeConfig(architectures=["LLaDA2MoeModelLM"])
    assert config.canvas_length == 32
    config.update({"canvas_length": None})
    assert config.canvas_length == 32
    config.update({"architectures": ["BailingMoeV2ForCausalLM"], "canvas_length": None})
    assert config.canvas_length is None


def test_a_value_of_another_type_is_refused_by_its_field() -> None:
    """Also where vLLM sets ``--hf-overrides`` on the finished configuration."""
    with pytest.raises(StrictDataclassError, match="'hidden_size' expected int"):
        LLaDA2MoeConfig(hidden_size="8")
    with pytest.raises(StrictDataclassError, match="'num_experts' expected int"):
        LLaDA2MoeConfig().update({"num_experts": "8"})


def test_explicit_qk_norm_is_kept() -> None:
    assert not LLaDA2MoeConfig(use_qk_norm=False).use_qk_norm


def test_survives_disk_and_pickle(tmp_path: Path) -> None:
    """Configurations travel to workers by pickle and to disk as JSON."""
    config = LLaDA2MoeConfig(hidden_size=64, num_attention_heads=2, mask_token_id=5, block_length=8)
    config.save_pretrained(tmp_path)
    for copy in (LLaDA2MoeConfig.from_pretrained(tmp_path), pickle.loads(pickle.dumps(config))):
        assert (copy.hidden_size, copy.mask_token_id, copy.canvas_length) == (64, 5, 8)
        assert copy.head_dim == 32
