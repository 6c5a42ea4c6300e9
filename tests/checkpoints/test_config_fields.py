"""Every published field of ``config.json``: what it does here. None is passed over by oversight."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.checkpoints import TINY_GEMMA
from tests.support.published import GEMMA_TEXT, LLADA22, gemma_config, llada2_config
from vllm_dllm.families.diffusion_gemma.family import ignored_fields
from vllm_dllm.families.llada2.hf_config import FIELDS, LLaDA2MoeConfig, contradictions
from vllm_dllm.families.llada2_2.family import LLaDA22
from vllm_dllm.ranges import SettingsError

READ, INERT = "read", "does not matter"

# Field of LLaDA2.0, 2.1 or 2.2 -> READ and another value that must be seen, a value that must be
# refused, or INERT and another value that changes nothing.
LLADA2: dict[str, tuple[str, Any]] = {
    "vocab_size": (READ, 1024),
    "hidden_size": (READ, 512),
    "intermediate_size": (READ, 96),
    "moe_intermediate_size": (READ, 96),
    "num_hidden_layers": (READ, 3),
    "num_attention_heads": (READ, 8),
    "num_key_value_heads": (READ, 2),
    "head_dim": (READ, 64),
    "rms_norm_eps": (READ, 1e-5),
    "max_position_embeddings": (READ, 131072),
    "rope_theta": (READ, 3e6),
    "rope_scaling": (READ, {"rope_type": "linear", "factor": 2.0}),
    "partial_rotary_factor": (READ, 1.0),
    "rotary_dim": (READ, 64),
    "num_experts": (READ, 64),
    "num_experts_per_tok": (READ, 4),
    "num_shared_experts": (READ, 2),
    "first_k_dense_replace": (READ, 2),
    "n_group": (READ, 4),
    "topk_group": (READ, 2),
    "norm_topk_prob": (READ, False),
    "routed_scaling_factor": (READ, 1.0),
    "score_function": (READ, None),
    "router_dtype": (READ, "bf16"),
    "moe_router_enable_expert_bias": (READ, True),
    "hidden_act": ("refused", "gelu"),
    "use_bias": (READ, True),
    "use_qkv_bias": (READ, True),
    "use_qk_norm": (READ, False),
    "norm_head": (READ, True),
    "tie_word_embeddings": (READ, True),
    "mask_token_id": (READ, 7),
    "block_length": (READ, 16),
    "block_size": (READ, 16),
    "canvas_length": (READ, 8),
    "eos_token_id": (READ, 5),
    "pad_token_id": (READ, 5),
    "dtype": (READ, "float32"),
    "architectures": (READ, ["LLaDA2MoeModelLM"]),
    "expert_capacity": ("refused", 48),
    "delete_token_id": ("refused", 156930),
    "split_token_id": ("refused", 156931),
    "use_rmsnorm": ("refused", False),
    "norm_softmax": ("refused", True),
    "using_split_qkv_in_self_attention": ("refused", True),
    "moe_shared_expert_intermediate_size": (READ, 96),
    "attention_dropout": (INERT, 0.1),
    "embedding_dropout": (INERT, 0.1),
    "output_dropout": (INERT, 0.1),
    "initializer_range": (INERT, 0.5),
    "max_window_layers": (INERT, 28),
    "sliding_window": (INERT, 4096),
    "use_sliding_window": (INERT, True),
    "output_router_logits": (INERT, True),
    "use_cache": (INERT, False),
    "transformers_version": (INERT, "4.52.3"),
    "auto_map": (INERT, {"AutoConfig": "x.Y"}),
    "model_type": (INERT, "llada2_moe"),
    "torch_dtype": (INERT, "bfloat16"),
}
# As the cards state them beside what `published.py` has, which a model of that size needs.
BESIDE = {
    "2.0": {
        "use_cache": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "rope_scaling": None, "pad_token_id": 156892,
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0,
        "initializer_range": 0.02, "norm_softmax": False, "output_router_logits": False,
        "using_split_qkv_in_self_attention": False, "transformers_version": "4.52.3",
        "torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "x.Y"},
    },
    "2.2": LLADA22,
}  # fmt: skip


def published(version: str) -> dict[str, Any]:
    return llada2_config("llada2-flash") | BESIDE[version]


@pytest.mark.parametrize("field", LLADA2)
def test_a_field(field: str) -> None:
    how, value = LLADA2[field]
    if how == "refused":
        with pytest.raises(SettingsError, match=rf"config\.json: {field}=.* asks for "):
            FIELDS.ignored({field: value}, {})
        with pytest.raises(SettingsError, match=f"--hf-overrides: {field}="):
            FIELDS.ignored({field: value}, {field: value})
        return
    assert FIELDS.ignored({field: value}, {}) == []
    config = LLaDA2MoeConfig(**{} if field == "model_type" else {field: value})
    if how == READ and field not in ("dtype",):
        assert getattr(config, field) == value


@pytest.mark.parametrize("version", BESIDE)
def test_every_published_field_is_in_the_table(version: str) -> None:
    assert published(version).keys() <= LLADA2.keys()


def test_a_published_checkpoint_is_taken_without_a_word() -> None:
    config = LLaDA2MoeConfig(**published("2.0"))
    assert config.canvas_length == 32
    assert FIELDS.ignored(published("2.0"), {}) == []
    assert list(contradictions(config)) == []


@pytest.mark.parametrize("field", ["expert_capacity", "delete_token_id", "split_token_id"])
def test_llada22_is_refused_by_each_field_of_its_own(field: str) -> None:
    """It has the class name of 2.1, and other experts."""
    asks = published("2.2") | dict.fromkeys(
        {"expert_capacity", "delete_token_id", "split_token_id"} - {field}
    )
    with pytest.raises(SettingsError, match=rf"config\.json: {field}=\d+ asks for .*LLaDA2\.2"):
        FIELDS.ignored(asks, {})


def test_a_capacity_of_none_asks_for_nothing() -> None:
    assert FIELDS.ignored({"expert_capacity": 0, "delete_token_id": None}, {}) == []


def test_llada22_has_an_architecture_of_its_own() -> None:
    """Its checkpoint states LLaDA2's; so do copies, and options of the server."""
    config = LLaDA2MoeConfig(**published("2.2"))
    assert config.architectures == ["LLaDA22MoeModelLM"]
    assert LLaDA2MoeConfig(**published("2.0")).architectures == ["LLaDA2MoeModelLM"]
    assert LLaDA22.fields.ignored(published("2.2"), {}) == []
    config.update({"expert_capacity": 0})
    assert config.architectures == ["LLaDA2MoeModelLM"]
    config.update({"expert_capacity": 24})
    assert (config.architectures, config.expert_capacity) == (["LLaDA22MoeModelLM"], 24)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score_function", "softmax"),
        ("moe_router_enable_expert_bias", False),
        ("norm_topk_prob", False),
        ("norm_softmax", True),
    ],
)
def test_what_block_routing_cannot_do_is_refused(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"config\.json: {field}=.* asks for "):
        LLaDA22.fields.ignored(published("2.2") | {field: value}, {})


def test_an_unknown_field_is_named() -> None:
    asked = published("2.0") | {"expert_capcity": 48, "router_jitter": 0.1}
    assert FIELDS.ignored(asked, {}) == ["expert_capcity", "router_jitter"]


# ---- DiffusionGemma

GEMMA_REFUSED = {"use_bidirectional_attention": "all"}


def gemma() -> dict[str, Any]:
    return json.loads(gemma_config().to_json_string(use_diff=False)) | {"text_config": GEMMA_TEXT}


@pytest.mark.parametrize("source", ["published", "written by transformers", "tiny"])
def test_diffusion_gemma_is_taken_without_a_word(source: str) -> None:
    stated = gemma()
    if source == "written by transformers":
        stated = json.loads(gemma_config().to_json_string(use_diff=False))
    elif source == "tiny":
        stated = json.loads((TINY_GEMMA / "config.json").read_text())
    assert ignored_fields(stated, {}) == []


def test_an_unknown_field_of_diffusion_gemma_is_named() -> None:
    stated = gemma() | {"expert_capacity": 4}
    stated["text_config"] = GEMMA_TEXT | {"hidden_size_per_layer_input": 256}
    stated["vision_config"] = stated["vision_config"] | {"tiles": 2}
    assert ignored_fields(stated, {}) == [
        "expert_capacity",
        "text_config.hidden_size_per_layer_input",
        "vision_config.tiles",
    ]


def test_a_field_that_diffusion_gemma_cannot_do_is_refused() -> None:
    stated = gemma() | {"text_config": GEMMA_TEXT | GEMMA_REFUSED}
    with pytest.raises(SettingsError, match=r"text_config\.use_bidirectional_attention='all'"):
        ignored_fields(stated, {})
