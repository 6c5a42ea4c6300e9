"""Every published field of SDAR's ``config.json``: what it does here; see `test_config_fields`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoints.test_config_fields import INERT, READ
from tests.support.published import SDAR, sdar_config
from vllm_dllm.families.sdar import family
from vllm_dllm.families.sdar.hf_config import SDARMoeConfig
from vllm_dllm.ranges import SettingsError

# Field -> READ and another value that must be seen, a value that must be refused, or INERT and
# another value that changes nothing.
DENSE: dict[str, tuple[str, Any]] = {
    "vocab_size": (READ, 1024),
    "hidden_size": (READ, 512),
    "intermediate_size": (READ, 96),
    "num_hidden_layers": (READ, 3),
    "num_attention_heads": (READ, 8),
    "num_key_value_heads": (READ, 2),
    "head_dim": (READ, 64),
    "rms_norm_eps": (READ, 1e-5),
    "max_position_embeddings": (READ, 131072),
    "rope_theta": (READ, 10000.0),
    "rope_scaling": (READ, {"rope_type": "linear", "factor": 2.0}),
    "tie_word_embeddings": (READ, True),
    "bos_token_id": (READ, 5),
    "eos_token_id": (READ, 5),
    "pad_token_id": (READ, 5),
    "mask_token_id": (READ, 7),
    "block_size": (READ, 16),
    "canvas_length": (READ, 8),
    "architectures": (READ, ["SDARForCausalLM"]),
    # Together they are a window, which the start-up refuses (`test_sdar_config`).
    "use_sliding_window": (READ, True),
    "sliding_window": (READ, None),
    "max_window_layers": (INERT, 12),
    "use_regular_causal": ("refused", True),
    "block_causal_prompt": ("refused", False),
    "is_causal": ("refused", False),
    "attention_bias": ("refused", True),
    "hidden_act": ("refused", "gelu"),
    "shared_expert_intermediate_size": ("refused", 96),
    "dual_chunk_attention_config": ("refused", {"chunk_size": 8192}),
    "attention_dropout": (INERT, 0.1),
    "initializer_range": (INERT, 0.5),
    "use_cache": (INERT, False),
    "attn_implementation": (INERT, "sdpa"),
    "debug": (INERT, True),
    "ep_size": (INERT, 8),
    "fuse_cross_entropy": (INERT, False),
    "micro_forward": (INERT, True),
    "skip_checkpoint": (INERT, True),
    "use_deepep": (INERT, True),
    "torch_dtype": (INERT, "float16"),
    "transformers_version": (INERT, "4.52.3"),
    "auto_map": (INERT, {"AutoConfig": "x.Y"}),
    "model_type": (INERT, "sdar"),
}
EXPERTS: dict[str, tuple[str, Any]] = {
    "num_experts": (READ, 64),
    "num_experts_per_tok": (READ, 4),
    "moe_intermediate_size": (READ, 96),
    "norm_topk_prob": (READ, False),
    "decoder_sparse_step": (READ, 2),
    "mlp_only_layers": (READ, [0]),
    "output_router_logits": (INERT, True),
    "router_aux_loss_coef": (INERT, 0.5),
}
CASES = [
    *((family.SDAR, name) for name in DENSE),
    *((family.SDARMoe, name) for name in (DENSE | EXPERTS)),
]


@pytest.mark.parametrize(("of", "field"), CASES)
def test_a_field(of: Any, field: str) -> None:
    how, value = (DENSE | EXPERTS)[field]
    if how == "refused":
        with pytest.raises(SettingsError, match=rf"config\.json: {field}=.* asks for "):
            of.fields.ignored({field: value}, {})
        return
    assert of.fields.ignored({field: value}, {}) == []
    config = of.fields.config_class(**({} if field == "model_type" else {field: value}))
    if how == READ and field in ("rope_theta", "rope_scaling"):
        said = {"rope_theta": value} if field == "rope_theta" else value
        assert said.items() <= config.rope_parameters.items()
    elif how == READ:
        assert getattr(config, field) == value


@pytest.mark.parametrize("which", SDAR)
def test_every_published_field_is_in_the_table(which: str) -> None:
    """And a published checkpoint is taken without a word."""
    stated = sdar_config(which)
    moe = stated["model_type"] == "sdar_moe"
    assert stated.keys() <= (DENSE | EXPERTS if moe else DENSE).keys()
    fields = (family.SDARMoe if moe else family.SDAR).fields
    assert fields.ignored(stated, {}) == []
    del stated["model_type"]
    fields.config_class(**stated)


def test_what_is_refused_is_in_the_table() -> None:
    assert family.SDAR.fields.supported.keys() == {
        name for name, (how, _) in DENSE.items() if how == "refused"
    }


def test_a_head_whose_size_is_not_stated() -> None:
    """Qwen3-MoE's class has no such field; without one a head is a share of the hidden size."""
    assert SDARMoeConfig(hidden_size=512, num_attention_heads=4).head_dim == 128
    assert SDARMoeConfig(hidden_size=512, num_attention_heads=4, head_dim=96).head_dim == 96


@pytest.mark.parametrize("field", EXPERTS)
def test_a_field_of_experts_is_unknown_to_a_dense_model(field: str) -> None:
    """A dense model with experts' fields is another model, and its user is told."""
    assert family.SDAR.fields.ignored({field: 1}, {}) == [field]
