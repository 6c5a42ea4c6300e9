"""Bad fields of a checkpoint's ``config.json``: taken as they stand, or refused by their name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings

from tests.settings.test_bad_input import refusal
from tests.support.engine import engine, greedy
from tests.support.reference import MARGIN, Rule
from tests.support.reference_llada2 import Reference, random_checkpoint
from tests.support.strategies import JSON, STEPS, Number, share
from vllm_dllm.families.config_fields import canvas_length
from vllm_dllm.families.llada2.family import LLaDA2MoeConfig

COUNT = Number(least=1, most=STEPS, whole=True)
FIELDS = sorted(vars(LLaDA2MoeConfig()).keys() & LLaDA2MoeConfig.__annotations__.keys())


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_type(name: str) -> None:
    for value in ("8x", [], {"a": 1}):
        if isinstance(getattr(LLaDA2MoeConfig(), name), str) and value == "8x":
            continue  # a word of another kind
        with pytest.raises(StrictDataclassError, match=f"'{name}'"):
            LLaDA2MoeConfig(**{name: value})
        with pytest.raises(StrictDataclassError, match=f"'{name}'"):
            LLaDA2MoeConfig().update({name: value})


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
    said = refusal(lambda: canvas_length(config))
    assert (said is None) == COUNT.takes(value), said
    assert said is None or "canvas_length" in said


# ---- the same on vLLM's engine: a checkpoint of that shape, whose config.json says more than this

# Without our check: an assertion without a word, "selected index k out of range", or an engine that
# starts and rotates half a pair, or chooses experts of groups that it has ruled out.
CONTRADICTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_key_value_heads": 3}, ("num_attention_heads=4", "num_key_value_heads=3")),
    ({"num_key_value_heads": 8}, ("num_attention_heads=4", "num_key_value_heads=8")),
    ({"num_key_value_heads": 0}, ("num_attention_heads=4", "num_key_value_heads=0")),
    ({"partial_rotary_factor": 0.16}, ("rotary_dim=5", "partial_rotary_factor=0.16")),
    ({"n_group": 3}, ("num_experts=8", "n_group=3")),
    ({"n_group": 16}, ("num_experts=8", "n_group=16")),
    ({"n_group": 8}, ("num_experts=8", "n_group=8")),
    ({"topk_group": 3}, ("topk_group=3", "n_group=2")),
    ({"n_group": None}, ("n_group=None", "topk_group=1")),
    ({"num_experts_per_tok": 5}, ("num_experts_per_tok=5", "topk_group=1")),
    ({"n_group": None, "topk_group": None, "num_experts_per_tok": 9}, ("num_experts_per_tok=9",)),
    ({"rotary_dim": 8}, ("rotary_dim=8", "partial_rotary_factor=0.5")),
    ({"eos_token_id": 300}, ("eos_token_id=300", "vocab_size=300")),
    ({"eos_token_id": [5, -1]}, ("eos_token_id", "-1", "vocab_size=300")),
    ({"mask_token_id": 300}, ("mask_token_id", "300")),
    ({"vocab_size": 250, "mask_token_id": 299}, ("mask_token_id", "250")),
    ({"max_position_embeddings": 16}, ("max_position_embeddings", "16")),
    # It makes the model one of LLaDA2.2, whose other fields are missing.
    ({"expert_capacity": 4}, ("delete_token_id", "is missing")),
    # What we do not do.
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
    made, said = AGREEMENTS[case]
    random_checkpoint(tmp_path, 3, **made)
    reference = Reference.load(tmp_path, 32, mask=299)
    edit(tmp_path / "config.json", **said)
    prompt = [11 * n % 290 for n in range(1, 41)]
    wanted = reference.generate(prompt, 20, Rule(threshold=0.5))
    assert wanted.margin > MARGIN, "a near tie: choose another prompt"
    with engine(tmp_path, 32) as running:
        params = greedy(20, ignore_eos=True, min_tokens=20, diffusion_threshold=0.5)
        assert running.generate([prompt], [params]) == [(wanted.tokens, "length")]


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
