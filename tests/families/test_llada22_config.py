"""LLaDA2.2's configuration: how it is told apart, and what is refused by name."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.reference_llada22 import random_checkpoint22
from vllm_dllm.decoding import EditTokens
from vllm_dllm.frontend.admission import validate_sampling_params
from vllm_dllm.vllm_seams.registration import RefusedError, register_models

pytestmark = pytest.mark.engine


def started(model: Path, **options: Any) -> Any:
    """vLLM's configuration of an engine that serves the checkpoint."""
    from vllm.engine.arg_utils import EngineArgs

    register_models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngineArgs(model=str(model), **options).create_engine_config()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random_checkpoint22(tmp_path, block=8)
    return tmp_path


def changed(model: Path, **stated: Any) -> None:
    """Change fields of ``config.json``; None removes one."""
    path = model / "config.json"
    config = json.loads(path.read_text()) | stated
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


def test_a_checkpoint_alone_says_everything(model: Path) -> None:
    served = started(model).model_config.dllm
    assert served.edit_tokens == EditTokens(299, 290, 291)
    assert served.length == 8
    choice = served.choose()
    assert choice.algorithm.name == "JointThresholdInDel"
    assert choice.settings.values() == {
        "threshold": 0.5,
        "edit_threshold": 0.0,
        "steps": 32,
        "max_post_edit_steps": 16,
    }
    assert choice.max_steps == 32 + 16 + 2


def test_a_variant_is_served_through_options(model: Path) -> None:
    """Another block length and other ids, or none in the file."""
    changed(model, delete_token_id=None)
    config = started(
        model,
        hf_overrides={"delete_token_id": 7, "mask_token_id": 8, "expert_capacity": 16},
        diffusion_config={"canvas_length": 16},
    )
    served = config.model_config.dllm
    assert (served.edit_tokens, served.length) == (EditTokens(8, 7, 291), 16)
    assert config.model_config.hf_config.expert_capacity == 16


@pytest.mark.parametrize(
    ("stated", "options", "message"),
    [
        ({"delete_token_id": None}, {}, "config.json: delete_token_id is missing; pass --hf-over"),
        ({"split_token_id": 300}, {}, "config.json: split_token_id=300 must be in [0, vocab_size"),
        ({}, {"hf_overrides": {"split_token_id": 290}}, "must be three different ids"),
        ({"expert_capacity": 1}, {}, "expert_capacity=1 must be at least num_experts_per_tok=2"),
        ({"expert_capacity": 17}, {}, "at most num_experts=16"),
        ({"norm_topk_prob": False}, {}, "norm_topk_prob=False asks for"),
        ({}, {"data_parallel_size": 2}, "--data-parallel-size: the experts of LLaDA2.2"),
        ({"expert_capacity": 0}, {}, "delete_token_id=290 asks for tokens that are deleted"),
    ],
)
def test_what_cannot_work_is_refused(
    model: Path, stated: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    changed(model, **stated)
    with pytest.raises(RefusedError, match=re.escape(message)):
        started(model, **options)


def test_its_rule_is_refused_elsewhere(model: Path) -> None:
    """LLaDA2.1 predicts no edits; the server and a request name what they asked for."""
    changed(model, **dict.fromkeys(("expert_capacity", "delete_token_id", "split_token_id")))
    rule = "JointThresholdInDel"
    with pytest.raises(RefusedError, match=r"dllm\.algorithm: JointThresholdInDel is for models"):
        started(model, additional_config={"dllm": {"algorithm": rule}})
    config = started(model)
    assert config.model_config.architecture == "LLaDA2MoeModelLM"
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    asked = SamplingParams(temperature=0, extra_args={"diffusion_algorithm": rule})
    with pytest.raises(VLLMValidationError, match="diffusion_algorithm: JointThresholdInDel is"):
        validate_sampling_params(asked, config.model_config.dllm, own_maximum=True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logprobs": 1}, "logprobs cannot be combined with JointThresholdInDel"),
        ({"logit_bias": {3: 1.0}}, "logit_bias cannot be combined"),
        ({"temperature": 0.5}, "temperature=0.5 is not supported by JointThresholdInDel"),
        ({"extra_args": {"diffusion_trace": True}}, "diffusion_trace cannot be combined"),
        ({"extra_args": {"diffusion_stream_prefix": True}}, "may still change what it has decided"),
        ({"extra_args": {"diffusion_steps": 129}}, "diffusion_steps must be at most 32"),
    ],
)
def test_what_a_request_cannot_ask_for(model: Path, asked: dict[str, Any], message: str) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    served = started(model).model_config.dllm
    with pytest.raises(VLLMValidationError, match=message):
        validate_sampling_params(SamplingParams(**({"temperature": 0} | asked)), served, True)
