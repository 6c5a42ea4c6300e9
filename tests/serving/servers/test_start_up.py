"""Refused at start-up, with the setting's name and the remedy; and what start-up changes by itself.

An engine configuration is made exactly as ``vllm serve`` makes it, without the server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.support.checkpoints import TINY_GEMMA
from tests.support.server import ENVIRONMENT

pytestmark = pytest.mark.e2e

# A child makes a configuration for each keyword set and prints the error or some settings.
CHILD = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

if __name__ == "__main__":
    load_general_plugins()
    for options in json.loads(sys.argv[1]):
        try:
            config = EngineArgs(**options).create_engine_config()
        except Exception as error:
            print(json.dumps({"error": str(error)}))
            continue
        scheduler, cache = config.scheduler_config, config.cache_config
        print(json.dumps({
            "budget": scheduler.max_num_batched_tokens,
            "page": cache.block_size,
            "context": config.model_config.max_model_len,
            "prefix_caching": cache.enable_prefix_caching,
            "mask": getattr(config.model_config.hf_config, "mask_token_id", None),
            "seats": scheduler.max_num_seqs,
            "scheduler": scheduler.scheduler_cls,
            "defaults": config.model_config.get_diff_sampling_param(),
            "canvas": config.diffusion_config.canvas_length,
        }))
"""


def configure(*options: dict[str, Any], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Each keyword set's configuration (or error), all in one child process."""
    return logged(*options, env=env)[0]


def logged(
    *options: dict[str, Any], env: dict[str, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The same, and what was logged meanwhile."""
    base = {"max_model_len": 512, "enforce_eager": True}
    cases = [base | o for o in options]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(cases)],
        env=os.environ | ENVIRONMENT | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(cases), child.stderr[-3000:]
    return lines, child.stderr + child.stdout


@pytest.fixture(scope="module")
def model() -> str:
    return str(oracle.checkpoint("ckpt_a_b32").path)


FUSED = {"additional_config": {"dllm": {"fused_commit": True}}}


def test_refused_with_name_and_remedy(model: str) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, ("max_num_batched_tokens", "32")),
        ({"runner": "pooling"}, ("--runner pooling", "--runner generate")),
        ({"convert": "embed"}, ("--runner pooling", "--runner generate")),
        ({"block_size": 16}, ("block_size=16", "multiple of 32")),
        ({"max_model_len": 16}, ("max_model_len=16", "at least 32")),
        ({"long_prefill_token_threshold": 8}, ("long_prefill_token_threshold=8", "32")),
        ({"additional_config": {"dllm": {"treshold": 0.5}}}, ("treshold", "'threshold'")),
        ({"additional_config": {"dllm": {"threshold": -1}}}, ("dllm.threshold", "at least 0")),
        ({"additional_config": {"dllm": {"algorithm": "LowConf"}}}, ("LowConf", "LowConfidence")),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            ("context parallelism", "tensor-parallel-size"),
        ),
        ({"scheduler_cls": "a.b.C"}, ("scheduler-cls", "remove")),
        # This platform would ignore the first, and has no Triton for our kernel.
        ({"attention_config": {"backend": "TRITON_ATTN"}}, ("TRITON_ATTN", "choose CPU_ATTN")),
        ({"attention_config": {"backend": "CUSTOM"}}, ("CUSTOM", "no Triton here")),
        ({"additional_config": {"dllm": {"kernels": "triton"}}}, ("dllm.kernels", "no Triton")),
        (
            {"additional_config": {"dllm": {"kernels": "cuda"}}},
            ("dllm.kernels", "auto, torch"),
        ),
        ({"diffusion_config": {"max_denoising_steps": -3}}, ("max_denoising_steps", "at least 1")),
        (
            {"hf_overrides": {"block_length": 32, "canvas_length": 16}},
            ("block_length=32", "canvas_length=16"),
        ),
        (
            {"additional_config": {"dllm": {"algorithm": "os:abort"}}},
            ("os:abort", "cannot be loaded: it does not inherit"),
        ),
        (
            {"max_model_len": 32, "async_scheduling": True} | FUSED,
            ("dllm.fused_commit=on", "one block"),
        ),
        (
            {"max_num_batched_tokens": 40, "max_num_seqs": 1, "async_scheduling": True} | FUSED,
            ("dllm.fused_commit=on", "40 tokens"),
        ),
        ({"pipeline_parallel_size": 2} | FUSED, ("dllm.fused_commit=on", "pipeline")),
        (
            {"additional_config": {"dllm": {"fused_commit": True, "skip_last_commit": False}}},
            ("dllm.fused_commit=on", "skip_last_commit"),
        ),
        ({"enable_prompt_embeds": True}, ("prompt-embeds",)),
    ]
    for (options, words), outcome in zip(
        cases, configure(*({"model": model} | o for o, _ in cases)), strict=True
    ):
        assert "error" in outcome, options
        assert all(word in outcome["error"] for word in words), outcome["error"]


@pytest.mark.parametrize("text", ["{", pytest.param("[1]", marks=pytest.mark.long)])
def test_an_unreadable_generation_config_is_refused(text: str, tmp_path: Path) -> None:
    """vLLM passes it over without a word."""
    copy = shutil.copytree(oracle.checkpoint("ckpt_a_b32").path, tmp_path / "model")
    (copy / "generation_config.json").write_text(text)
    (outcome,) = configure({"model": str(copy)})
    assert "generation_config.json" in outcome["error"]


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_USE_V2_MODEL_RUNNER=0",
        pytest.param("VLLM_RAISE_ON_LOGIT_NANS=1", marks=pytest.mark.long),
        pytest.param("VLLM_BATCH_INVARIANT=1", marks=pytest.mark.long),
    ],
)
def test_refused_variables_of_the_environment(model: str, variable: str) -> None:
    (outcome,) = configure({"model": model}, env=dict([variable.split("=")]))
    assert variable in outcome["error"]


def test_what_start_up_sets(model: str) -> None:
    plain, small, given, canvas = configure(
        {"model": model, "max_num_seqs": 256},
        {"model": model, "max_num_seqs": 16, "max_num_batched_tokens": 48},
        {"model": model, "block_size": 64, "override_generation_config": {"top_p": 0.9}},
        {"model": model, "diffusion_config": {"canvas_length": 48}},
    )
    # Every running request's canvas fits into a step, unless the user says otherwise.
    assert plain["budget"] == 256 * 32
    assert small["budget"] == 48
    assert plain["page"] == 128
    assert plain["prefix_caching"]
    assert plain["defaults"]["temperature"] == 0
    assert given["page"] == 64
    assert given["defaults"] == {"temperature": 0, "top_p": 0.9}
    # 48 and vLLM's granularity of 32 meet at 96; the default page of 128 is rounded up.
    assert (canvas["canvas"], canvas["page"], canvas["context"]) == (48, 192, 480)
    assert plain["mask"] == 511


GEMMA = str(TINY_GEMMA)


@pytest.mark.long
def test_what_start_up_sets_for_gemma() -> None:
    """No cap at 8 requests, as vLLM's own class needs one; that class is one variable away."""
    plain, given = configure({"model": GEMMA}, {"model": GEMMA, "max_num_seqs": 3})
    assert plain["seats"] >= 64  # memory does not bind here; vLLM's own default does
    assert plain["budget"] >= plain["seats"] * 32
    assert given["seats"] == 3
    assert "vllm_dllm" in plain["scheduler"]
    assert plain["defaults"].get("temperature", 1.0) == 1.0
    (native,) = configure({"model": GEMMA}, env={"VLLM_DLLM_NATIVE": "1"})
    assert native["seats"] == 8
    assert native["scheduler"] is None or "vllm_dllm" not in native["scheduler"]


@pytest.mark.long
def test_gemma_refusals() -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"pipeline_parallel_size": 2}, ("pipeline-parallel-size", "tensor-parallel-size")),
        ({"additional_config": {"dllm": {"window": "round"}}}, ("dllm.window", "symmetric")),
        (
            {"additional_config": {"dllm": {"threshold": 0.5}}},
            ("dllm.threshold is not a setting of EntropyBound", "LowConfidence"),
        ),
        (
            {"additional_config": {"dllm": {"algorithm": "LowConfidence"}}},
            ("dllm.algorithm", "does not fit", "EntropyBound"),
        ),
        ({"additional_config": {"dllm": {"t_max": 0}}}, ("dllm.t_max", "above 0")),
        ({"additional_config": {"dllm": {"eos_early_stop": True}}}, ("dllm.eos_early_stop",)),
        (FUSED, ("dllm.fused_commit=on", "different masks")),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, ("max_num_batched_tokens", "32")),
        ({"runner": "pooling"}, ("--runner pooling", "--runner generate")),
        (
            {"hf_overrides": {"text_config": {"use_bidirectional_attention": "all"}}},
            ("text_config.use_bidirectional_attention='all'", "not supported"),
        ),
    ]
    outcomes = configure(*({"model": GEMMA} | options for options, _ in cases))
    for (options, words), outcome in zip(cases, outcomes, strict=True):
        assert "error" in outcome, options
        assert all(word in outcome["error"] for word in words), outcome["error"]


def test_names_that_nobody_reads(model: str) -> None:
    """A field of config.json: named in the log, and the engine starts. A key of another plugin
    beside ours: not our business."""
    misspelt = {
        "hf_overrides": {"router_jitter": 0.1},
        "additional_config": {"dllm": {"max_steps": 4}, "somebody_elses": 1},
    }
    started, log = logged({"model": model} | misspelt, {"model": GEMMA} | misspelt)
    assert not any("error" in one for one in started), started
    assert log.count("--hf-overrides: router_jitter has no effect; remove it") == 2
    assert "dllm: --additional-config" not in log
    _, log = logged({"model": model}, {"model": GEMMA})
    assert "has no effect" not in log and "ignored; if" not in log


def copy_of(model: str, target: Path) -> Path:
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("golden.json"))
    for file in target.iterdir():
        file.chmod(0o644)
    target.chmod(0o755)
    return target


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not None}))


@pytest.mark.long
def test_missing_mask_token(model: str, tmp_path: Path) -> None:
    """The tokenizer knows no mask: the error says where it was looked for and what to pass."""
    broken = copy_of(model, tmp_path / "m")
    (broken / "special_tokens_map.json").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (broken / name).read_text()
        (broken / name).write_text(text.replace("<|mask|>", "<|musk|>"))
    edit(broken / "tokenizer_config.json", mask_token=None)
    missing, told = configure(
        {"model": str(broken)}, {"model": str(broken), "hf_overrides": {"mask_token_id": 5}}
    )
    assert "no mask token" in missing["error"]
    assert "--hf-overrides" in missing["error"]
    assert told["mask"] == 5
