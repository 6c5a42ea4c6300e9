"""Bad fields of a checkpoint's ``config.json``: taken as they stand, or refused by their name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reliability.strategies import ALWAYS, FLOAT32, JSON, STEPS, Number, same, share
from tests.reliability.test_bad_input import refusal
from vllm_dllm.engine.setup_gemma import check_canvas_length
from vllm_dllm.models.llada2_config import LLaDA2MoeConfig

BIG = 1 << 24
COUNT = Number(least=1, most=STEPS, whole=True)
SIZE = Number(least=1, most=BIG, whole=True)
ZERO = Number(most=STEPS, whole=True)
PART = Number(above=True, most=1)
FACTOR = Number(above=True, most=FLOAT32)
NUMBERS = {
    "vocab_size": SIZE, "hidden_size": SIZE, "intermediate_size": SIZE,
    "moe_intermediate_size": SIZE, "num_hidden_layers": COUNT, "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT, "head_dim": COUNT, "rotary_dim": COUNT, "num_experts": COUNT,
    "num_experts_per_tok": COUNT, "n_group": COUNT, "topk_group": COUNT,
    "num_shared_experts": ZERO, "first_k_dense_replace": ZERO, "block_length": COUNT,
    "canvas_length": COUNT, "mask_token_id": Number(most=BIG, whole=True),
    "max_position_embeddings": Number(least=1, most=2**31 - 1, whole=True),
    "rms_norm_eps": PART, "partial_rotary_factor": PART, "embedding_dropout": Number(most=1),
    "rope_theta": FACTOR, "routed_scaling_factor": FACTOR,
}  # fmt: skip
OPTIONAL = {
    "head_dim", "rotary_dim", "n_group", "topk_group", "mask_token_id", "block_length",
    "canvas_length", "score_function", "router_dtype",
}  # fmt: skip
FLAGS = {
    "use_qk_norm", "use_rmsnorm", "use_bias", "use_qkv_bias", "norm_head", "norm_topk_prob",
    "moe_router_enable_expert_bias", "tie_word_embeddings",
}  # fmt: skip
WORDS = {"score_function": ("sigmoid", "softmax"), "router_dtype": ("fp32", "bf16")}
NAMES = st.sampled_from(sorted({*NUMBERS, *FLAGS, *WORDS}))
VALUES = (
    JSON
    | st.sampled_from([name for names in WORDS.values() for name in names])
    | COUNT.edges()
    | SIZE.edges()
    | PART.edges()
)


def legal(name: str, value: Any) -> bool:
    if value is None:
        return name in OPTIONAL
    if name in NUMBERS:
        return NUMBERS[name].takes(value)
    if name in FLAGS:
        return isinstance(value, bool)
    return isinstance(value, str) and value in WORDS[name]


def test_every_field_is_fuzzed() -> None:
    own = vars(LLaDA2MoeConfig()).keys() - vars(type(LLaDA2MoeConfig()).__mro__[1]()).keys()
    # hidden_act is checked by the model, rope_parameters are transformers' own.
    assert own - {"hidden_act", "rope_parameters"} <= {*NUMBERS, *FLAGS, *WORDS}


@settings(max_examples=share(0.1))
@given(NAMES, VALUES)
@example("block_length", 0)
@example("head_dim", 0)
def test_a_field(name: str, value: Any) -> None:
    said = refusal(lambda: LLaDA2MoeConfig(**{name: value}))
    if said is not None and "_dim = " in said:
        assert name in ("hidden_size", "num_attention_heads", "head_dim", "partial_rotary_factor")
        assert f"{name}={value}" in said
        return
    assert (said is None) == legal(name, value), said
    if said is not None:
        assert f"config.json: {name}" in said
    elif value is not None:
        assert same(value, getattr(LLaDA2MoeConfig(**{name: value}), name))


def test_each_field_is_given_each_oddity() -> None:
    for name in [*NUMBERS, *FLAGS, *WORDS]:
        for value in ALWAYS:
            test_a_field.hypothesis.inner_test(name, value)


@settings(max_examples=share(0.05))
@given(NAMES, VALUES)
def test_an_override(name: str, value: Any) -> None:
    """``--hf-overrides`` are set on the finished configuration."""
    config = LLaDA2MoeConfig()
    said = refusal(lambda: config.update({name: value}))
    assert (said is None) == legal(name, value), said
    assert name in said if said else same(value, getattr(config, name))


@settings(max_examples=share(0.03))
@given(st.dictionaries(NAMES, VALUES, max_size=5))
@example({"block_length": 8, "canvas_length": 16})
def test_several_fields(fields: dict[str, Any]) -> None:
    said = refusal(lambda: LLaDA2MoeConfig(**fields))
    if said is not None:
        assert any(name in said for name in fields)
    else:
        assert all(legal(name, value) for name, value in fields.items())
        assert all(
            same(v, getattr(LLaDA2MoeConfig(**fields), n)) or v is None for n, v in fields.items()
        )


@settings(max_examples=share(0.04))
@given(JSON | COUNT.edges())
def test_the_canvas_length_of_diffusion_gemma(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    model = tmp_path_factory.getbasetemp() / "gemma-config"
    model.mkdir(exist_ok=True)
    Path(model, "config.json").write_text(json.dumps({"canvas_length": value}))
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, hf_overrides={}),
        diffusion_config=None,
    )
    said = refusal(lambda: check_canvas_length(config))
    assert (said is None) == COUNT.takes(value), said
    assert said is None or "canvas_length" in said
