"""Every published field of ``config.json``: what it does here. None is passed over by oversight."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.checkpoints import TINY_GEMMA
from tests.support.published import (
    GEMMA_TEXT,
    LLADA22,
    NEMOTRON,
    SDAR,
    diffcoder_config,
    dream_config,
    fast_dllm_config,
    gemma_config,
    llada2_config,
    nemotron_config,
    openpangu_config,
    sdar_config,
)
from vllm_dllm.families import dream_reasoner, fast_dllm, openpangu, sdar
from vllm_dllm.families import nemotron_labs_diffusion as nemotron
from vllm_dllm.families.config_fields import Fields
from vllm_dllm.families.diffusion_gemma.family import ignored_fields
from vllm_dllm.families.llada2.family import FIELDS, LLaDA2MoeConfig, contradictions
from vllm_dllm.families.llada2_2.family import LLaDA22
from vllm_dllm.families.stable_diffcoder import StableDiffCoder
from vllm_dllm.ranges import SettingsError


@dataclass(frozen=True)
class Known:
    """What a family makes of fields.

    Attributes:
        published: whole files, whose fields are taken without a word.
        refused: field -> a value that asks for something else.
    """

    fields: Fields
    published: list[dict[str, Any]]
    refused: dict[str, Any]


ROPE = {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
DUAL = {"dual_chunk_attention_config": {"chunk_size": 8192}}
# As the cards of LLaDA2 state them beside what `published.py` has.
BESIDE_2_0: dict[str, Any] = (
    {"use_cache": False, "use_sliding_window": False, "sliding_window": 4096, "rope_scaling": None}
    | {"max_window_layers": 28, "pad_token_id": 156892, "initializer_range": 0.02}
    | {"attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0}
    | {"norm_softmax": False, "using_split_qkv_in_self_attention": False, "torch_dtype": "bfloat16"}
    | {"output_router_logits": False, "transformers_version": "4.52.3", "auto_map": {"A": "x.Y"}}
)
LLADA2_0 = llada2_config("llada2-flash") | BESIDE_2_0
LLADA2_2 = llada2_config("llada2-flash") | LLADA22
EDITS = {"expert_capacity": 48, "delete_token_id": 156930, "split_token_id": 156931}
LLADA2_REFUSED = {"hidden_act": "gelu", "use_rmsnorm": False, "norm_softmax": True}
LLADA2_REFUSED |= {"using_split_qkv_in_self_attention": True}
SDAR_REFUSED = (
    {"use_regular_causal": True, "block_causal_prompt": False, "is_causal": False}
    | {"attention_bias": True, "hidden_act": "gelu", "shared_expert_intermediate_size": 96}
    | DUAL
)


def of_sdar(model_type: str) -> list[dict[str, Any]]:
    return [one for one in map(sdar_config, SDAR) if one["model_type"] == model_type]


KNOWN = {
    "llada2": Known(FIELDS, [LLADA2_0], LLADA2_REFUSED | EDITS),
    "llada2.2": Known(
        LLaDA22.fields,
        [LLADA2_2],
        {"score_function": "softmax", "moe_router_enable_expert_bias": False}
        | {"norm_topk_prob": False}
        | LLADA2_REFUSED,
    ),
    "sdar": Known(sdar.SDAR.fields, of_sdar("sdar"), SDAR_REFUSED),
    "sdar with experts": Known(sdar.SDARMoe.fields, of_sdar("sdar_moe"), SDAR_REFUSED),
    "nemotron": Known(
        nemotron.FIELDS,
        [nemotron_config(which) for which in NEMOTRON],
        {"dlm_paradigm": "block_diff", "ar_mode": True, "attention_bias": True, "mlp_bias": True}
        | {"hidden_act": "gelu"},
    ),
    "diffcoder": Known(
        StableDiffCoder.fields,
        [diffcoder_config()],
        {"is_causal": False, "hidden_act": "gelu", "bias": True, "qkv_bias": True}
        | {"layer_types": ["full_attention"] * 2, "logit_scale": 0.5},
    ),
    "fast-dllm": Known(
        fast_dllm.FIELDS,
        [fast_dllm_config()],
        {"is_causal": False, "hidden_act": "gelu"} | DUAL,
    ),
    "dream": Known(
        dream_reasoner.DreamReasoner.fields,
        [{name: value for name, value in dream_config().items() if value is not None}],
        SDAR_REFUSED,
    ),
    "openpangu": Known(
        openpangu.FIELDS,
        [openpangu_config()],
        {"is_causal": False, "hidden_act": "gelu", "qkv_bias": True, "sandwich_norm": True}
        | {"n_routed_experts": 8, "param_sink_number": 128}
        | {"layer_types": ["full_attention"] * 2},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_fields_that_ask_for_something_else_are_refused(name: str) -> None:
    known = KNOWN[name]
    assert known.fields.supported.keys() == known.refused.keys()
    for field, value in known.refused.items():
        with pytest.raises(SettingsError, match=rf"config\.json: {field}=.* asks for "):
            known.fields.ignored({field: value}, {})
        with pytest.raises(SettingsError, match=f"--hf-overrides: {field}="):
            known.fields.ignored({field: value}, {field: value})


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_checkpoint_is_taken_without_a_word(name: str) -> None:
    """And its numbers are read, or others in their place."""
    fields = KNOWN[name].fields
    for published in KNOWN[name].published:
        assert fields.ignored(published, {}) == []
        stated = {field: value for field, value in published.items() if field != "model_type"}
        config = fields.config_class(**stated)
        assert getattr(config, "canvas_length", None) in (None, 4, 32)
        if name.startswith("llada2"):
            assert list(contradictions(config)) == []
        for field, value in stated.items():
            if type(value) is int and field not in ROPE:
                assert getattr(config, field) == value
                other = stated | {"layer_types": None, field: 2 * value or 1}
                assert getattr(fields.config_class(**other), field) == (2 * value or 1)
        if "rope_theta" in stated:
            config = fields.config_class(**(stated | ROPE))
            if not name.startswith("llada2"):
                said = {"rope_theta": ROPE["rope_theta"], **ROPE["rope_scaling"]}
                assert said.items() <= config.rope_parameters.items()


def test_an_unknown_field_is_named() -> None:
    asked = LLADA2_0 | {"expert_capcity": 48, "router_jitter": 0.1}
    assert FIELDS.ignored(asked, {}) == ["expert_capcity", "router_jitter"]
    # A dense model with experts' fields is another model.
    for fields in (sdar.SDAR.fields, StableDiffCoder.fields):
        assert fields.ignored({"num_experts": 8}, {}) == ["num_experts"]


@pytest.mark.parametrize("field", EDITS)
def test_llada22_is_refused_by_each_field_of_its_own(field: str) -> None:
    """It has the class name of 2.1, and other experts."""
    asks = LLADA2_2 | dict.fromkeys(EDITS.keys() - {field})
    with pytest.raises(SettingsError, match=rf"config\.json: {field}=\d+ asks for .*LLaDA2\.2"):
        FIELDS.ignored(asks, {})
    assert FIELDS.ignored({"expert_capacity": 0, "delete_token_id": None}, {}) == []


def test_llada22_has_an_architecture_of_its_own() -> None:
    """Its checkpoint states LLaDA2's; so do copies, and options of the server."""
    config = LLaDA2MoeConfig(**LLADA2_2)
    assert config.architectures == ["LLaDA22MoeModelLM"]
    assert LLaDA2MoeConfig(**LLADA2_0).architectures == ["LLaDA2MoeModelLM"]
    config.update({"expert_capacity": 0})
    assert config.architectures == ["LLaDA2MoeModelLM"]
    config.update({"expert_capacity": 24})
    assert (config.architectures, config.expert_capacity) == (["LLaDA22MoeModelLM"], 24)


def test_diffusion_gemma_is_taken_without_a_word() -> None:
    by_transformers = json.loads(gemma_config().to_json_string(use_diff=False))
    tiny = json.loads((TINY_GEMMA / "config.json").read_text())
    for stated in (by_transformers | {"text_config": GEMMA_TEXT}, by_transformers, tiny):
        assert ignored_fields(stated, {}) == []
    more = by_transformers | {"expert_capacity": 4}
    more["text_config"] = GEMMA_TEXT | {"hidden_size_per_layer_input": 256}
    more["vision_config"] = more["vision_config"] | {"tiles": 2}
    assert ignored_fields(more, {}) == [
        "expert_capacity",
        "text_config.hidden_size_per_layer_input",
        "vision_config.tiles",
    ]
    both_ways = {"text_config": GEMMA_TEXT | {"use_bidirectional_attention": "all"}}
    with pytest.raises(SettingsError, match=r"text_config\.use_bidirectional_attention='all'"):
        ignored_fields(by_transformers | both_ways, {})
