"""Every published field of Fast-dLLM v2's ``config.json``; see `test_config_fields`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

from tests.checkpoints.test_config_fields import INERT, READ
from tests.support.published import fast_dllm_config
from vllm_dllm.families.fast_dllm.family import FIELDS
from vllm_dllm.families.fast_dllm.hf_config import FastDLLMConfig
from vllm_dllm.ranges import SettingsError

# As in `test_sdar_fields`.
TABLE: dict[str, tuple[str, Any]] = {
    "vocab_size": (READ, 1024),
    "hidden_size": (READ, 512),
    "intermediate_size": (READ, 96),
    "num_hidden_layers": (READ, 3),
    "num_attention_heads": (READ, 8),
    "num_key_value_heads": (READ, 2),
    "rms_norm_eps": (READ, 1e-5),
    "max_position_embeddings": (READ, 131072),
    "rope_theta": (READ, 500000.0),
    "rope_scaling": (READ, {"rope_type": "linear", "factor": 2.0}),
    "tie_word_embeddings": (READ, True),
    "bos_token_id": (READ, 5),
    "eos_token_id": (READ, 5),
    "pad_token_id": (READ, 5),
    "mask_token_id": (READ, 7),
    "bd_size": (READ, 16),
    "canvas_length": (READ, 8),
    "architectures": (READ, ["Fast_dLLM_QwenForCausalLM"]),
    # Together they are a window, which the start-up refuses.
    "use_sliding_window": (READ, True),
    "sliding_window": (READ, None),
    "layer_types": (READ, ["full_attention"] * 32),
    "max_window_layers": (INERT, 12),
    "is_causal": ("refused", False),
    "hidden_act": ("refused", "gelu"),
    "dual_chunk_attention_config": ("refused", {"chunk_size": 8192}),
    "conplemenrary_mask": (INERT, False),
    "attention_dropout": (INERT, 0.1),
    "initializer_range": (INERT, 0.5),
    "use_cache": (INERT, False),
    "attn_implementation": (INERT, "sdpa"),
    "torch_dtype": (INERT, "float16"),
    "transformers_version": (INERT, "4.52.3"),
    "auto_map": (INERT, {"AutoConfig": "x.Y"}),
    "model_type": (INERT, "Fast_dLLM_Qwen"),
}


@pytest.mark.parametrize("field", TABLE)
def test_a_field(field: str) -> None:
    how, value = TABLE[field]
    if how == "refused":
        with pytest.raises(SettingsError, match=rf"config\.json: {field}=.* asks for "):
            FIELDS.ignored({field: value}, {})
        return
    assert FIELDS.ignored({field: value}, {}) == []
    config = FastDLLMConfig(**({} if field == "model_type" else {field: value}))
    if how == READ and field in ("rope_theta", "rope_scaling"):
        said = {"rope_theta": value} if field == "rope_theta" else value
        assert said.items() <= config.rope_parameters.items()
    elif how == READ:
        assert getattr(config, field) == value


def test_every_published_field_is_in_the_table() -> None:
    """And a published checkpoint is taken without a word."""
    stated = fast_dllm_config()
    assert stated.keys() <= TABLE.keys()
    assert FIELDS.ignored(stated, {}) == []
    assert FIELDS.supported.keys() == {name for name, (how, _) in TABLE.items() if how == "refused"}
    del stated["model_type"]
    assert FastDLLMConfig(**stated).canvas_length == 32


def test_the_block_length_of_a_configuration() -> None:
    assert FastDLLMConfig().canvas_length == 32
    assert FastDLLMConfig(bd_size=8).canvas_length == 8
    assert FastDLLMConfig(bd_size=8, canvas_length=16).canvas_length == 16
    assert FastDLLMConfig(attn_implementation="sdpa")._attn_implementation is None
    assert Qwen2Config.model_type == "qwen2"
