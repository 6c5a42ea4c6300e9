"""Bad fields of a checkpoint's ``config.json``: taken as they stand, or refused by their name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.settings.test_bad_input import refusal
from tests.support.engine import engine, greedy
from tests.support.reference_llada2 import Reference, random_checkpoint
from tests.support.strategies import ALWAYS, FLOAT32, JSON, STEPS, Number, same, share
from vllm_dllm.families.diffusion_gemma.engine_config import check_canvas_length
from vllm_dllm.families.llada2.hf_config import LLaDA2MoeConfig

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
    "use_qk_norm", "use_bias", "use_qkv_bias", "norm_head", "norm_topk_prob",
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
    # rope_parameters are transformers' own; for the others see test_config_fields.
    assert own - {"hidden_act", "rope_parameters", "use_rmsnorm"} <= {*NUMBERS, *FLAGS, *WORDS}


# What a field that is not stated is taken for.
STATED: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip


def contradictory(fields: dict[str, Any]) -> bool:
    """Whether these legal fields, or one of them and a default, admit no model."""
    c = STATED | fields
    heads = c["num_attention_heads"]
    dim = c.get("head_dim") or c["hidden_size"] / heads
    rotary, factor = c.get("rotary_dim"), c.get("partial_rotary_factor")
    if dim % 1 or not 1 <= dim <= STEPS or heads % c.get("num_key_value_heads", min(4, heads)):
        return True
    if rotary and factor and abs(rotary - dim * factor) >= 1:
        return True
    rotary = rotary or int(dim * (factor or 0.5))
    if rotary % 2 or not 1 <= rotary <= dim:
        return True
    groups, chosen = c["n_group"], c["topk_group"]
    if (groups is None) != (chosen is None):
        return True
    groups, chosen = groups or 1, chosen or 1
    size, odd = divmod(c["num_experts"], groups)
    biased, score = c["moe_router_enable_expert_bias"], c["score_function"]
    return bool(
        odd
        or (biased and size < 2)
        or chosen > groups
        or c["num_experts_per_tok"] > chosen * size
        or score == ("softmax" if biased else "sigmoid")
    )


@settings(max_examples=share(0.1))
@given(NAMES, VALUES)
@example("block_length", 0)
@example("head_dim", 0)
def test_a_field(name: str, value: Any) -> None:
    said = refusal(lambda: LLaDA2MoeConfig(**{name: value}))
    if not legal(name, value):
        assert said is not None
        assert f"config.json: {name}" in said
    elif contradictory({name: value}):
        assert said is not None
        assert f"{name}={value}" in said
    else:
        assert said is None
        assert value is None or same(value, getattr(LLaDA2MoeConfig(**{name: value}), name))


def test_each_field_is_given_each_oddity() -> None:
    for name in [*NUMBERS, *FLAGS, *WORDS]:
        for value in ALWAYS:
            test_a_field.hypothesis.inner_test(name, value)


@settings(max_examples=share(0.05))
@given(NAMES, VALUES)
def test_an_override(name: str, value: Any) -> None:
    """``--hf-overrides`` are set on the finished configuration."""
    config = LLaDA2MoeConfig()
    stated = {n: getattr(config, n) for n in ("head_dim", "rotary_dim", "partial_rotary_factor")}
    said = refusal(lambda: config.update({name: value}))
    fits = legal(name, value) and not contradictory(
        {"num_key_value_heads": 4} | stated | {name: value}
    )
    assert (said is None) == fits, said
    assert name in said if said else value is None or same(value, getattr(config, name))


@settings(max_examples=share(0.03))
@given(st.dictionaries(NAMES, VALUES, max_size=5))
@example({"block_length": 8, "canvas_length": 16})
def test_several_fields(fields: dict[str, Any]) -> None:
    said = refusal(lambda: LLaDA2MoeConfig(**fields))
    if said is not None:
        assert any(name in said for name in fields)
    else:
        assert all(legal(name, value) for name, value in fields.items())
        assert not contradictory(fields)
        assert all(
            same(v, getattr(LLaDA2MoeConfig(**fields), n)) or v is None for n, v in fields.items()
        )


SMALL = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64])
RELATED = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok"), SMALL
    )
    | {name: SMALL | st.none() for name in ("n_group", "topk_group", "head_dim", "rotary_dim")}
    | {name: st.sampled_from([*words, None]) for name, words in WORDS.items()}
    | {"moe_router_enable_expert_bias": st.booleans(), "hidden_size": SMALL.map(lambda n: n * 8)}
    | {"partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0]) | PART.edges()},
)


@settings(max_examples=share(0.1))
@given(RELATED, st.booleans())
def test_fields_that_depend_on_each_other(fields: dict[str, Any], later: bool) -> None:
    """Sizes that are all legal alone: refused exactly when no model can have them all.

    `later` gives them as overrides; what was derived before is stated then.
    """
    config = LLaDA2MoeConfig()
    assume(all(legal(name, value) for name, value in fields.items()))
    if later:
        derived = ("head_dim", "rotary_dim", "partial_rotary_factor", "num_key_value_heads")
        whole = {name: getattr(config, name) for name in derived} | fields
        said = refusal(lambda: config.update(fields))
    else:
        whole, said = fields, refusal(lambda: LLaDA2MoeConfig(**fields))
    assert (said is not None) == contradictory(whole), said
    derived = {"head_dim"} if {"hidden_size", "num_attention_heads"} & set(fields) else set()
    assert said is None or any(name in said for name in derived.union(fields))


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


# ---- the same on vLLM's engine: a checkpoint of that shape, whose config.json says more than this

# Without our check: an assertion without a word, "selected index k out of range", "shape '[6, 3,
# -1]' is invalid", or an engine that starts and chooses experts of groups that it has ruled out.
CONTRADICTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_key_value_heads": 3}, ("num_attention_heads=4", "num_key_value_heads=3")),
    ({"num_key_value_heads": 8}, ("num_attention_heads=4", "num_key_value_heads=8")),
    ({"head_dim": None, "num_attention_heads": 5}, ("hidden_size=96", "num_attention_heads=5")),
    ({"n_group": 3}, ("num_experts=8", "n_group=3")),
    ({"n_group": 16}, ("num_experts=8", "n_group=16")),
    ({"n_group": 8}, ("num_experts=8", "n_group=8")),
    ({"topk_group": 3}, ("topk_group=3", "n_group=2")),
    ({"n_group": None}, ("n_group=None", "topk_group=1")),
    ({"num_experts_per_tok": 5}, ("num_experts_per_tok=5", "topk_group=1")),
    ({"n_group": None, "topk_group": None, "num_experts_per_tok": 9}, ("num_experts_per_tok=9",)),
    ({"score_function": "softmax"}, ("score_function=softmax", "expert_bias=True")),
    ({"partial_rotary_factor": 0.16}, ("rotary_dim", "partial_rotary_factor=0.16")),
    ({"rotary_dim": 64, "partial_rotary_factor": 1.0}, ("rotary_dim=64", "head_dim=32")),
    ({"rotary_dim": 8}, ("rotary_dim=8", "partial_rotary_factor=0.5")),
    ({"head_dim": 33, "partial_rotary_factor": 1.0}, ("head_dim", "33")),
    ({"eos_token_id": 300}, ("eos_token_id=300", "vocab_size=300")),
    ({"eos_token_id": [5, -1]}, ("eos_token_id", "-1", "vocab_size=300")),
    ({"mask_token_id": 300}, ("mask_token_id", "300")),
    ({"vocab_size": 250, "mask_token_id": 299}, ("mask_token_id", "250")),
    ({"max_position_embeddings": 16}, ("max_position_embeddings", "16")),
    # What we do not do; without our check other experts would be chosen.
    ({"expert_capacity": 4}, ("expert_capacity=4", "whole blocks")),
    ({"use_rmsnorm": False}, ("use_rmsnorm=False", "layer norm")),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model"
    random_checkpoint(path, 0)
    return path


@pytest.mark.engine
@pytest.mark.parametrize(("fields", "words"), CONTRADICTIONS, ids=str)
@pytest.mark.parametrize("way", ["file", "override"])
def test_a_contradiction(
    way: str, fields: dict[str, Any], words: tuple[str, ...], plain: Path, tmp_path: Path
) -> None:
    """No engine starts, be it that the checkpoint or the user says so."""
    options: dict[str, Any] = {}
    if way == "file":
        plain = shutil.copytree(plain, tmp_path / "model")
        edit(plain / "config.json", **fields)
    else:
        options["hf_overrides"] = fields
    with pytest.raises((ValueError, RuntimeError)) as caught, engine(plain, 32, **options):
        pass
    assert all(word in str(caught.value) for word in words), caught.value


# Odd together, and yet a model: what the checkpoint is made with, and what its file says then.
AGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all-layers-dense": ({"first_k_dense_replace": 3}, {"first_k_dense_replace": 4}),
    "no-groups": ({"n_group": 1}, {"n_group": None, "topk_group": None}),
    "cut-off-rotary": ({"partial_rotary_factor": 0.4}, {}),  # 12.8 dimensions are 12
    "rotary-alone": ({"partial_rotary_factor": 0.25}, {"rotary_dim": 8}),
    "window-in-a-canvas": ({}, {"sliding_window": 8, "use_sliding_window": True}),
    "pad-outside": ({}, {"pad_token_id": 300}),
}


@pytest.mark.engine
@pytest.mark.parametrize("case", AGREEMENTS)
def test_an_odd_agreement(case: str, tmp_path: Path) -> None:
    """Served, and as the reference reads it."""
    made, said = AGREEMENTS[case]
    random_checkpoint(tmp_path, 3, **made)
    reference = Reference.load(tmp_path, 32, mask=299)
    edit(tmp_path / "config.json", **said)
    prompt = [11 * n % 290 for n in range(1, 41)]
    wanted, margin = reference.generate(prompt, 0.5, 20, set())
    assert margin > 3e-5, "a near tie: choose another prompt"
    with engine(tmp_path, 32) as running:
        params = greedy(20, ignore_eos=True, min_tokens=20, diffusion_threshold=0.5)
        assert running.generate([prompt], [params]) == [(wanted, "length")]


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
