"""What start-up refuses, with the name of what was typed and the remedy, and what it sets.

Configurations are made as ``vllm serve`` and ``LLM(...)`` make them, many in one process; two
commands are typed in full. `tests/support/mistakes_in_requests.py` has the mistakes in requests.
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
from tests.support.mistaken_replicas import REPLICAS
from tests.support.mistaken_transfers import TRANSFERS
from tests.support.mistakes import EVERY, GEMMA, MASKED, MOST_CHARACTERS, Mistake, dllm, model_of
from tests.support.server import AS_SERVED, ENVIRONMENT, Server

pytestmark = pytest.mark.e2e

CHILD = """
import json, sys
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

def made(options):
    try:
        config = EngineArgs(**options).create_engine_config()
    except ValidationError as error:  # what pydantic makes of the exception of a check
        return str(error.errors()[0].get("ctx", {}).get("error", error))
    except Exception as error:
        return str(error)
    scheduler, cache = config.scheduler_config, config.cache_config
    return {
        "budget": scheduler.max_num_batched_tokens,
        "page": cache.block_size,
        "context": config.model_config.max_model_len,
        "prefix_caching": cache.enable_prefix_caching,
        "mask": getattr(config.model_config.hf_config, "mask_token_id", None),
        "seats": scheduler.max_num_seqs,
        "scheduler": scheduler.scheduler_cls,
        "defaults": config.model_config.get_diff_sampling_param(),
        "canvas": config.diffusion_config.canvas_length,
    }

if __name__ == "__main__":
    load_general_plugins()
    for options in json.load(sys.stdin):
        print(json.dumps({"made": made(options)}))
"""


def beside(**keys: Any) -> dict[str, Any]:
    return {"additional_config": keys}


FUSED = dllm(fused_commit=True)
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
FEW_POSITIONS = {"hf_overrides": {"vision_config": {"position_embedding_size": 500}}}
# Our settings: their names, places and values.
SETTINGS = [
    Mistake(MASKED, dllm(treshold=0.5), "'treshold'", "did you mean 'threshold'?"),
    Mistake(GEMMA, dllm(stability_treshold=3), "'stability_treshold'", "'stability_threshold'?"),
    Mistake(MASKED, dllm(threshold="0.9"), "dllm.threshold", "must be a number, got '0.9'"),
    Mistake(MASKED, dllm(threshold=-1), "dllm.threshold", "at least 0"),
    Mistake(MASKED, dllm(threshold=True), "dllm.threshold", "must be a number, got True"),
    Mistake(EVERY, dllm(max_steps=0), "dllm.max_steps", "must be at least 1"),
    Mistake(EVERY, dllm(execution="fast"), "dllm.execution", "must be one of fdfo, sync"),
    Mistake(EVERY, dllm(kernels="cuda"), "dllm.kernels", "must be one of auto, torch, triton"),
    Mistake(EVERY, dllm(kernels="triton"), "dllm.kernels=triton", "no Triton here; remove it"),
    Mistake(EVERY, dllm(fused_commit="yes"), "dllm.fused_commit", "one of auto, on, off"),
    Mistake(MASKED, dllm(eos_early_stop="yes"), "dllm.eos_early_stop", "must be true or false"),
    Mistake(EVERY, dllm(request_step_limit=0), "dllm.request_step_limit", "at least 1"),
    Mistake(EVERY, dllm(constraint_depth=2000), "dllm.constraint_depth", "at most 1024"),
    Mistake(EVERY, dllm(stream_prefix=True), "dllm.stream_prefix", "diffusion_stream_prefix in vl"),
    Mistake(MASKED, dllm(diffusion_threshold=0.9), "dllm.diffusion_threshold", "write 'threshold'"),
    Mistake(
        EVERY,
        beside(threshold=0.9),
        "'threshold' is outside of 'dllm'",
        'write {"dllm": {"threshold": 0.9}}',
    ),
    Mistake(
        EVERY, beside(t_max=0.9, dllm={}), "'t_max' is outside", 'write {"dllm": {"t_max": 0.9}}'
    ),
    Mistake(EVERY, beside(DLLM={"max_steps": 3}), "'DLLM'", "did you mean 'dllm'?"),
    Mistake(EVERY, beside(dlm={"max_steps": 3}), "'dlm'", "did you mean 'dllm'?"),
    Mistake(EVERY, beside(dllm="Credit"), "'dllm'", "must be an object of settings, got 'Credit'"),
    Mistake(MASKED, dllm(window="reference"), "dllm.window", "remove it"),
    Mistake(GEMMA, dllm(t_max=0), "dllm.t_max", "above 0"),
    Mistake(GEMMA, dllm(window="round"), "dllm.window", "must be one of symmetric, reference"),
    Mistake(GEMMA, dllm(eos_early_stop=True), "dllm.eos_early_stop", "remove it"),
    Mistake(GEMMA, dllm(entropy_bound=0), "dllm.entropy_bound", "above 0"),
    Mistake(GEMMA, dllm(t_min=0.9, t_max=0.5), "dllm.t_max", "must be above dllm.t_min=0.9"),
    Mistake(("SDAR",), dllm(steps=1.5), "dllm.steps", "must be a whole number, got 1.5"),
]
ALGORITHMS = [
    Mistake(MASKED, dllm(algorithm="LowConfidense"), "dllm.algorithm", "mean 'LowConfidence'?"),
    Mistake(MASKED, dllm(algorithm="FIXEDSTEPS"), "'FIXEDSTEPS'", "did you mean 'FixedSteps'?"),
    Mistake(EVERY, dllm(algorithm=3), "dllm.algorithm", "must be a string that names one, got 3"),
    Mistake(EVERY, dllm(algorithm="os:abort"), "'os:abort'", "cannot be loaded"),
    Mistake(
        GEMMA,
        dllm(algorithm="FixedSteps", steps=8),  # the setting's is the lesser reason
        "dllm.algorithm: FixedSteps does not fit this model",
        "masked models; choose EntropyBound",
    ),
    Mistake(
        GEMMA,
        dllm(threshold=0.9),
        "dllm.threshold is not a setting of EntropyBound, which has dllm.confidence_threshold",
        "remove it, because it belongs to ConfidenceThreshold, Credit, FrechetProfile",
    ),
    Mistake(GEMMA, dllm(treshold=0.9), "'treshold': dllm.threshold is not", "remove it"),
    Mistake(
        ("LLaDA2",),
        dllm(low=0.5),
        "dllm.low is not a setting of LowConfidence, which has dllm.threshold",
        "remove it, or set dllm.algorithm to Hierarchical",
    ),
    Mistake(
        ("SDAR",),
        dllm(algorithm="Sequential", threshold=0.9),
        "dllm.threshold is not a setting of Sequential, which has dllm.steps",
        "remove it, or set dllm.algorithm to ConfidenceThreshold",
    ),
    Mistake(
        MASKED,
        dllm(t_max=0.9),
        "dllm.t_max is not a setting of LowConfidence",
        "it belongs to EntropyBound, for models that denoise random tokens (DiffusionGemma)",
    ),
]
# VLLM's options.
OPTIONS = [
    Mistake(EVERY, NGRAM, "--speculative-config", "remove it"),
    Mistake(EVERY, {"scheduler_cls": "a.B"}, "--scheduler-cls", "remove it"),
    Mistake(EVERY, {"runner": "pooling"}, "--runner pooling", "serve it with --runner generate"),
    Mistake(EVERY, {"convert": "embed"}, "--runner pooling", "--runner generate"),
    Mistake(("LLaDA2",), {"long_prefill_token_threshold": 8}, "_token_threshold=8", "32"),
    Mistake(
        ("LLaDA2",),
        {"hf_overrides": {"block_length": 32, "canvas_length": 16}},
        "block_length=32",
        "canvas_length=16",
    ),
    Mistake(
        GEMMA,
        {"hf_overrides": {"text_config": {"use_bidirectional_attention": "all"}}},
        "text_config.use_bidirectional_attention='all'",
        "not supported",
    ),
    # A step with two blocks has no room, or no use.
    Mistake(GEMMA, FUSED, "dllm.fused_commit=on", "different masks"),
    Mistake(
        ("LLaDA2",),
        {"max_model_len": 32, "async_scheduling": True} | FUSED,
        "dllm.fused_commit=on",
        "one block",
    ),
    Mistake(
        ("LLaDA2",),
        {"max_num_batched_tokens": 40, "max_num_seqs": 1, "async_scheduling": True} | FUSED,
        "dllm.fused_commit=on",
        "40 tokens",
    ),
    Mistake(
        ("LLaDA2",),
        dllm(fused_commit=True, skip_last_commit=False),
        "dllm.fused_commit=on",
        "skip_last_commit",
    ),
    Mistake(
        ("LLaDA2", "DiffusionGemma"),
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        "max_num_batched_tokens=16",
        "set --max-num-batched-tokens to at least 32",
    ),
    Mistake(
        EVERY,
        {"structured_outputs_config": {"backend": "xgrammar"}},
        "--structured-outputs-config.backend xgrammar",
        "remove it",
    ),
    Mistake(EVERY, {"logits_processors": ["a:B"]}, "--logits-processors", "remove it"),
    Mistake(EVERY, {"max_logprobs": -1}, "--max-logprobs -1", "set it to 128 or less"),
    *(
        Mistake(EVERY, {"load_format": name}, f"--load-format {name}", f"`pip install {package}`")
        for name, package in (
            ("runai_streamer", "runai-model-streamer"),
            ("fastsafetensors", "fastsafetensors"),
            ("tensorizer", "tensorizer"),
        )
    ),
    Mistake(EVERY, {"enable_prompt_embeds": True}, "--enable-prompt-embeds", "remove it"),
    Mistake(GEMMA, {"enable_mm_embeds": True}, "--enable-mm-embeds", "remove it"),
    Mistake(
        ("LLaDA2", "DiffusionGemma"),
        {"enable_return_routed_experts": True},
        "--enable-return-routed-experts",
        "remove it",
    ),
    Mistake(
        EVERY,
        {"enable_batch_sharded_sampling": True, "tensor_parallel_size": 2},
        "--enable-batch-sharded-sampling",
        "remove it",
    ),
    Mistake(EVERY, {"ubatch_size": 2}, "--ubatch-size", "remove it"),
    Mistake(EVERY, {"use_fp64_gumbel": True}, "--use-fp64-gumbel", "remove it"),
    Mistake(EVERY, {"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill", "remove it"),
    Mistake(EVERY, {"enable_trace_replay": True}, "--enable-trace-replay", "remove it"),
    Mistake(EVERY, {"watermark_config": {"key": 1}}, "--watermark-config", "remove it"),
    Mistake(
        ("LLaDA2",),
        {
            "model_class_overrides": {
                "LLaDA2MoeModelLM": "vllm_dllm.families.llada2.model:LLaDA2MoeModelLM"
            }
        },
        "--model-class-overrides",
        "remove it",
    ),
    Mistake(
        GEMMA,
        {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_producer"}},
        "--ec-transfer-config",
        "remove it",
    ),
    Mistake(GEMMA, {"mm_encoder_only": True}, "--mm-encoder-only", "remove it"),
    Mistake(
        GEMMA,
        FEW_POSITIONS,
        "max_soft_tokens=280: of such images one may be 840 patches wide",
        "pass --mm-processor-kwargs '{\"max_soft_tokens\": 140}' or --limit-mm-per-prompt",
    ),
    Mistake(
        GEMMA,
        FEW_POSITIONS | {"mm_processor_kwargs": {"max_soft_tokens": 1120}},
        "max_soft_tokens=1120",
        "'{\"max_soft_tokens\": 140}'",
    ),
    Mistake(
        ("SDAR",),
        {"hf_overrides": {"use_sliding_window": True, "sliding_window": 16}},
        "sliding_window=16",
        "serve contexts that fit into it with --disable-sliding-window",
    ),
    Mistake(
        EVERY,
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "context parallelism",
        "use --tensor-parallel-size",
    ),
    Mistake(
        GEMMA, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size", "--tensor-parallel-size"
    ),
    Mistake(
        MASKED,
        {"pipeline_parallel_size": 2} | dllm(fused_commit=True),
        "dllm.fused_commit=on",
        "pipeline",
    ),
    Mistake(
        EVERY, {"attention_config": {"backend": "TRITON_ATTN"}}, "TRITON_ATTN", "choose CPU_ATTN"
    ),
    Mistake(EVERY, {"attention_config": {"backend": "CUSTOM"}}, "CUSTOM", "no Triton here"),
    Mistake(
        ("LLaDA2",), {"max_model_len": 16}, "max_model_len=16", "set --max-model-len to at lea"
    ),
    Mistake(("LLaDA2",), {"block_size": 16}, "block_size=16", "multiple of 32"),
    Mistake(
        MASKED,
        {"hf_overrides": {"mask_token_id": 10**5}},
        "mask_token_id 100000",
        "pass --hf-overrides",
    ),
    Mistake(
        EVERY, {"diffusion_config": {"max_denoising_steps": 0}}, "max_denoising_steps", "at least 1"
    ),
    Mistake(
        ("SDAR",),
        {"hf_overrides": {"use_regular_causal": True}},
        "use_regular_causal=True",
        "not supported",
    ),
]
MISTAKES = [*SETTINGS, *ALGORITHMS, *OPTIONS, *REPLICAS, *TRANSFERS]


def configured(
    cases: list[dict[str, Any]], env: dict[str, str] | None = None
) -> tuple[list[Any], str]:
    """What becomes of each of these options, in one process: settings, or an error; and its log."""
    base = {"max_model_len": 512, "enforce_eager": True}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([base | case for case in cases]),
        env=os.environ | ENVIRONMENT | AS_SERVED | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    made = [json.loads(ln)["made"] for ln in child.stdout.splitlines() if ln.startswith('{"made"')]
    assert len(made) == len(cases), child.stderr[-3000:]
    return made, child.stderr + child.stdout


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int], str]:
    """What is said about each mistake, by family and place in the table."""
    places = [(family, n) for n, one in enumerate(MISTAKES) for family in one.families]
    made, _ = configured([{"model": str(model_of(f))} | MISTAKES[n].typed for f, n in places])
    return dict(zip(places, made, strict=True))


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda n: MISTAKES[n].name)
def test_a_configuration(answers: dict[tuple[str, int], str], number: int) -> None:
    mistake = MISTAKES[number]
    for family in mistake.families:
        message = answers[family, number]
        assert isinstance(message, str), f"{family} starts"
        assert mistake.named in message and mistake.remedy in message, (family, message)
        if not mistake.vllm:
            assert "\n" not in message and len(message) <= MOST_CHARACTERS, message


def output(*flags: str) -> str:
    """What a ``vllm serve`` that does not start says."""
    server = Server(model_of("LLaDA2"), *flags, log=Path(os.devnull))
    captured: Any = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(server.command, env=server.environment, timeout=300, **captured)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.long
def test_a_command() -> None:
    """It ends with the sentence, as the last line of vLLM's traceback."""
    last = output("--additional-config", '{"dllm": {"treshold": 0.9}}').rstrip().splitlines()[-1]
    assert last.endswith("RefusedError: unknown dllm setting 'treshold'; did you mean 'threshold'?")


def test_a_file_of_flags(tmp_path: Path) -> None:
    """It is named, because the command line does not show what is in it."""
    file = tmp_path / "server.yaml"
    file.write_text('additional-config: \'{"dllm": {"max_steps": 0}}\'\n')
    last = output("--config", str(file)).rstrip().splitlines()[-1]
    assert "dllm.max_steps must be at least 1" in last
    assert last.endswith(f"(options were also read from --config {file})")


# ---- what start-up changes by itself, for each family

GOLDEN = str(oracle.checkpoint("ckpt_a_b32").path)


def copy_with(folder: Path, **files: str) -> str:
    """A copy of a golden checkpoint with other contents of some files of JSON."""
    ignored = shutil.ignore_patterns("golden.json")
    copy = shutil.copytree(GOLDEN, folder / "m", ignore=ignored, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    for name, content in files.items():
        (copy / f"{name}.json").write_text(content)
    return str(copy)


def test_what_start_up_sets(tmp_path: Path) -> None:
    """Also with a file that vLLM passes over without a word."""
    unreadable = copy_with(tmp_path, generation_config="{")
    (plain, small, given, canvas, refused, gemma), log = configured(
        [
            {"model": GOLDEN, "max_num_seqs": 256},
            {"model": GOLDEN, "max_num_seqs": 16, "max_num_batched_tokens": 48},
            {
                "model": GOLDEN,
                "block_size": 64,
                "override_generation_config": {"top_p": 0.9},
            },
            {"model": GOLDEN, "diffusion_config": {"canvas_length": 48}},
            {"model": unreadable},
            {"model": str(model_of("DiffusionGemma"))},
        ]
    )
    # Every running request's canvas fits into a step, unless the user says otherwise.
    assert (plain["budget"], small["budget"]) == (256 * 32, 48)
    assert plain["prefix_caching"] and plain["mask"] == 511
    assert (plain["page"], given["page"]) == (128, 64)
    assert plain["defaults"]["temperature"] == 0
    assert given["defaults"] == {"temperature": 0, "top_p": 0.9}
    # 48 and vLLM's granularity of 32 meet at 96; the default page of 128 is rounded up.
    assert (canvas["canvas"], canvas["page"], canvas["context"]) == (48, 192, 480)
    assert "generation_config.json" in refused
    # No cap at 8 requests, as vLLM's own class needs one.
    assert gemma["seats"] >= 64 and gemma["budget"] >= gemma["seats"] * 32
    assert gemma["defaults"].get("temperature", 1.0) == 1.0 and "vllm_dllm" in gemma["scheduler"]
    assert "has no effect" not in log and "ignored; if" not in log


def test_names_that_nobody_reads() -> None:
    """A field of config.json: named in the log, and the engine starts. A key of another plugin
    beside ours: not our business."""
    misspelt = {
        "hf_overrides": {"router_jitter": 0.1},
        "additional_config": {"dllm": {"max_steps": 4}, "somebody_elses": 1},
    }
    models = (GOLDEN, str(model_of("DiffusionGemma")))
    made, log = configured([{"model": model} | misspelt for model in models])
    assert not any(isinstance(one, str) for one in made), made
    assert log.count("--hf-overrides: router_jitter has no effect; remove it") == 2
    assert "dllm: --additional-config" not in log


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_USE_V2_MODEL_RUNNER=0",
        pytest.param("VLLM_RAISE_ON_LOGIT_NANS=1", marks=pytest.mark.long),
        pytest.param("VLLM_BATCH_INVARIANT=1", marks=pytest.mark.long),
    ],
)
def test_refused_variables_of_the_environment(variable: str) -> None:
    (message,), _ = configured([{"model": GOLDEN}], dict([variable.split("=")]))
    assert variable in message


@pytest.mark.long
def test_vllms_own_class_of_gemma() -> None:
    """It is one variable away."""
    gemma = {"model": str(model_of("DiffusionGemma"))}
    (native,), _ = configured([gemma], {"VLLM_DLLM_NATIVE": "1"})
    assert native["seats"] == 8
    assert native["scheduler"] is None or "vllm_dllm" not in native["scheduler"]


@pytest.mark.long
def test_missing_mask_token(tmp_path: Path) -> None:
    """The tokenizer knows no mask: the error says where it was looked for and what to pass."""
    renamed = {
        name: (Path(GOLDEN) / f"{name}.json").read_text().replace("<|mask|>", "<|musk|>")
        for name in ("tokenizer", "tokenizer_config")
    }
    settings = json.loads(renamed["tokenizer_config"])
    settings.pop("mask_token", None)
    renamed["tokenizer_config"] = json.dumps(settings)
    broken = copy_with(tmp_path, special_tokens_map="{}", **renamed)
    (missing, told), _ = configured(
        [{"model": broken}, {"model": broken, "hf_overrides": {"mask_token_id": 5}}]
    )
    assert "no mask token" in missing and "--hf-overrides" in missing
    assert told["mask"] == 5
