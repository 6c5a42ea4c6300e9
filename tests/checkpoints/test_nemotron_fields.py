"""Every published field of Nemotron-Labs-Diffusion's ``config.json``; see `test_config_fields`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoints.test_config_fields import INERT, READ
from tests.support.published import NEMOTRON, nemotron_config
from vllm_dllm.families.nemotron_labs_diffusion.hf_config import (
    FIELDS,
    NemotronLabsDiffusionConfig,
)
from vllm_dllm.ranges import SettingsError

# Field -> READ and another value that must be seen, a value that must be refused, or INERT and
# another value that changes nothing.
TABLE: dict[str, tuple[str, Any]] = {
    "vocab_size": (READ, 1024),
    "hidden_size": (READ, 512),
    "intermediate_size": (READ, 96),
    "num_hidden_layers": (READ, 3),
    "num_attention_heads": (READ, 8),
    "num_key_value_heads": (READ, 2),
    "head_dim": (READ, 64),
    "rms_norm_eps": (READ, 1e-6),
    "max_position_embeddings": (READ, 131072),
    "rope_parameters": (READ, {"rope_type": "default", "rope_theta": 1e4}),
    "tie_word_embeddings": (READ, True),
    "bos_token_id": (READ, 5),
    "eos_token_id": (READ, 11),
    "pad_token_id": (READ, 5),
    "mask_token_id": (READ, 7),
    "block_size": (READ, 16),
    "canvas_length": (READ, 8),
    "architectures": (READ, ["NemotronLabsDiffusionModel"]),
    "sliding_window": (READ, 64),  # which the start-up refuses (`test_nemotron_config`)
    "dlm_paradigm": ("refused", "block_diff"),
    "ar_mode": ("refused", True),
    "attention_bias": ("refused", True),
    "mlp_bias": ("refused", True),
    "hidden_act": ("refused", "gelu"),
    "dlm_loss_weight": (INERT, 0.5),
    "ar_loss_weight": (INERT, 0.5),
    "dp_varying_mask_ratio": (INERT, True),
    "attention_dropout": (INERT, 0.1),
    "initializer_range": (INERT, 0.5),
    "use_cache": (INERT, False),
    "attn_implementation": (INERT, "sdpa"),
    "torch_dtype": (INERT, "float16"),
    "transformers_version": (INERT, "4.52.3"),
    "auto_map": (INERT, {"AutoConfig": "x.Y"}),
    "model_type": (INERT, "nemotron_labs_diffusion"),
}


@pytest.mark.parametrize("field", TABLE)
def test_a_field(field: str) -> None:
    how, value = TABLE[field]
    if how == "refused":
        with pytest.raises(SettingsError, match=rf"config\.json: {field}=.* asks for "):
            FIELDS.ignored({field: value}, {})
        return
    assert FIELDS.ignored({field: value}, {}) == []
    given = dict(value) if isinstance(value, dict) else value
    config = NemotronLabsDiffusionConfig(**({} if field == "model_type" else {field: given}))
    if how == READ:
        assert getattr(config, field) == value


@pytest.mark.parametrize("which", NEMOTRON)
def test_a_published_checkpoint_is_taken_without_a_word(which: str) -> None:
    stated = nemotron_config(which)
    assert stated.keys() <= TABLE.keys()
    assert FIELDS.ignored(stated, {}) == []
    del stated["model_type"]
    NemotronLabsDiffusionConfig(**stated)


def test_what_is_refused_is_in_the_table() -> None:
    assert FIELDS.supported.keys() == {name for name, (how, _) in TABLE.items() if how == "refused"}
