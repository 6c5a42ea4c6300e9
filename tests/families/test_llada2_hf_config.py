"""What real checkpoints leave out of ``config.json``."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from vllm_dllm.families.llada2.hf_config import LLaDA2MoeConfig


def test_missing_keys_take_the_authors_values() -> None:
    config = LLaDA2MoeConfig(hidden_size=2048, num_attention_heads=16, head_dim=128)
    assert config.use_qk_norm, "vLLM's BailingMoeV2 would assume false"
    assert config.mask_token_id is None
    assert config.canvas_length == 32
    assert config.rotary_dim == 64
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


def test_two_block_lengths_are_none() -> None:
    with pytest.raises(ValueError, match="block_length=8 and canvas_length=16"):
        LLaDA2MoeConfig(block_length=8, canvas_length=16)


def test_an_override_is_checked() -> None:
    """vLLM sets ``--hf-overrides`` on the finished configuration."""
    with pytest.raises(ValueError, match="--hf-overrides: num_experts must be a whole number"):
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
