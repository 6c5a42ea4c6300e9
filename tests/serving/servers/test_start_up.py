"""What start-up refuses, with the name of what was typed and the remedy, and what it sets.

Configurations are made as ``vllm serve`` and ``LLM(...)`` make them, many in one process; one
command is typed in full. `tests/support/mistakes_in_requests.py` has the mistakes in requests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.support.child import in_child
from tests.support.forked import ENVIRONMENT
from tests.support.mistakes import EVERY, GEMMA, MASKED, MODELS, MOST_CHARACTERS, Mistake, dllm
from tests.support.server import AS_SERVED, Server

pytestmark = pytest.mark.e2e

SPREAD = {"enable_expert_parallel": True}
HYBRID = {"data_parallel_size_local": 1, "data_parallel_hybrid_lb": True}
REPLICAS = [
    *(
        Mistake(
            ("LLaDA2", "DiffusionGemma"),
            {f"{axis}_parallel_size": 2, **SPREAD},
            "--enable-expert-parallel: on the CPU vLLM's experts cannot be spread over ranks",
            "remove it",
        )
        for axis in ("tensor", "data")
    ),
    Mistake(
        EVERY,
        {"data_parallel_size": 2, **SPREAD, "enable_eplb": True},
        "Expert parallelism load balancing",
        "only supported on CUDA",
        vllm=True,
    ),
    Mistake(
        ("SDAR",),
        {"data_parallel_size": 2, **HYBRID},
        "--data-parallel-hybrid-lb: with one rank on a node",
        "start independent servers",
    ),
    Mistake(
        ("SDAR",),
        {"data_parallel_size": 2, "data_parallel_rank": 0},
        "external data parallel mode",
        "launch independent vLLM instances",
        vllm=True,
    ),
]


def connector(name: str, extra: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra or {}}
    return {"kv_transfer_config": config | keys}


CHOOSE = "choose ExampleConnector, or remove it"
TRANSFERS = [
    Mistake(
        EVERY,
        connector("NixlConnector"),
        "--kv-transfer-config: connector 'NixlConnector': it would move keys and values",
        CHOOSE,
    ),
    Mistake(MASKED, connector("MyConnector"), "connector 'MyConnector': it would", CHOOSE),
    Mistake(
        GEMMA,
        connector("ExampleConnector", kv_connector_module_path="mine.example"),
        "'ExampleConnector' of 'mine.example'",
        CHOOSE,
    ),
    Mistake(
        GEMMA,
        connector("ExampleConnector", {"shared_path": "/tmp"}),
        "no setting 'shared_path', only 'shared_storage_path'",
        "remove it",
    ),
    Mistake(
        MASKED,
        connector("ExampleConnector") | {"tensor_parallel_size": 2},
        "--kv-transfer-config",
        "remove it, or --tensor-parallel-size",
    ),
    Mistake(EVERY, {"kv_offloading_size": 1.0}, "--kv-offloading-size 1.0", "remove it"),
]


FUSED = dllm(fused_commit=True)
# Our settings; all others of `tests/settings` come to the user by the same way.
SETTINGS = [
    Mistake(EVERY, dllm(max_step=0), "'max_step'", "did you mean 'max_steps'?"),
    Mistake(EVERY, dllm(kernels="triton"), "dllm.kernels=triton", "no Triton here; remove it"),
    Mistake(
        EVERY,
        {"additional_config": {"threshold": 0.9}},
        "'threshold' is outside of 'dllm'",
        'write {"dllm": {"threshold": 0.9}}',
    ),
    Mistake(MASKED, dllm(window="reference"), "dllm.window", "remove it"),
    Mistake(GEMMA, dllm(eos_early_stop=True), "dllm.eos_early_stop", "remove it"),
    Mistake(EVERY, dllm(algorithm="os:abort"), "'os:abort'", "cannot be loaded"),
    Mistake(
        GEMMA,
        dllm(algorithm="FixedSteps", steps=8),  # the setting's is the lesser reason
        "dllm.algorithm: FixedSteps does not fit this model",
        "masked models; choose EntropyBound",
    ),
    # A step with two blocks has no room, or no use.
    Mistake(GEMMA, FUSED, "dllm.fused_commit=on", "different masks"),
    Mistake(MASKED, {"pipeline_parallel_size": 2} | FUSED, "dllm.fused_commit=on", "pipeline"),
    *(
        Mistake(("LLaDA2",), {"async_scheduling": True} | options, "dllm.fused_commit=on", why)
        for options, why in (
            ({"max_model_len": 32} | FUSED, "one block"),
            ({"max_num_batched_tokens": 40, "max_num_seqs": 1} | FUSED, "40 tokens"),
            (dllm(fused_commit=True, skip_last_commit=False), "skip_last_commit"),
        )
    ),
]
# VLLM's options; `tests/startup/test_engine_arguments.py` has those that are refused alike.
OPTIONS = [
    Mistake(
        EVERY,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        "--speculative-config",
        "remove it",
    ),
    Mistake(EVERY, {"logits_processors": ["a:B"]}, "--logits-processors", "remove it"),
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
    Mistake(EVERY, {"max_logprobs": -1}, "--max-logprobs -1", "set it to 128 or less"),
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
        EVERY, {"attention_config": {"backend": "TRITON_ATTN"}}, "TRITON_ATTN", "choose CPU_ATTN"
    ),
    Mistake(
        ("LLaDA2",), {"max_model_len": 16}, "max_model_len=16", "set --max-model-len to at lea"
    ),
    Mistake(("LLaDA2",), {"block_size": 16}, "block_size=16", "multiple of 32"),
    Mistake(
        EVERY, {"diffusion_config": {"max_denoising_steps": 0}}, "max_denoising_steps", "at least 1"
    ),
]
MISTAKES = [*SETTINGS, *OPTIONS, *REPLICAS, *TRANSFERS]


def made(cases: list[dict[str, Any]]) -> Iterator[Any]:
    """Settings, or the error, of each configuration."""
    from pydantic import ValidationError
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for options in cases:
        try:
            config = EngineArgs(**options).create_engine_config()
        except ValidationError as error:  # what pydantic makes of the exception of a check
            yield str(error.errors()[0].get("ctx", {}).get("error", error))
        except Exception as error:
            yield str(error)
        else:
            scheduler, cache = config.scheduler_config, config.cache_config
            yield {
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


def configured(cases: list[dict[str, Any]], env: dict[str, str] | None = None) -> list[Any]:
    """The same in one process of its own, with what all cases have."""
    base = {"max_model_len": 512, "enforce_eager": True}
    environment = os.environ | ENVIRONMENT | AS_SERVED | (env or {})
    return in_child(made, [base | case for case in cases], env=environment)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int], str]:
    """What is said about each mistake, by family and place in the table."""
    places = [(family, n) for n, one in enumerate(MISTAKES) for family in one.families]
    said = configured([{"model": str(MODELS[f])} | MISTAKES[n].typed for f, n in places])
    return dict(zip(places, said, strict=True))


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda n: MISTAKES[n].name)
def test_a_configuration(answers: dict[tuple[str, int], str], number: int) -> None:
    mistake = MISTAKES[number]
    for family in mistake.families:
        message = answers[family, number]
        assert isinstance(message, str), f"{family} starts"
        assert mistake.named in message and mistake.remedy in message, (family, message)
        if not mistake.vllm:
            assert "\n" not in message and len(message) <= MOST_CHARACTERS, message


def test_a_file_of_flags(tmp_path: Path) -> None:
    """It is named in the last line of vLLM's traceback: the command line does not show it."""
    file = tmp_path / "server.yaml"
    file.write_text('additional-config: \'{"dllm": {"max_steps": 0}}\'\n')
    server = Server(MODELS["LLaDA2"], "--config", str(file), log=Path(os.devnull))
    captured: Any = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(server.command, env=server.environment, timeout=300, **captured)
    assert done.returncode == 1, done.stderr
    last = done.stderr.rstrip().splitlines()[-1]
    assert "RefusedError: dllm.max_steps must be at least 1" in last
    assert last.endswith(f"(options were also read from --config {file})")


# ---- what start-up changes by itself, for each family


def golden() -> str:
    return str(oracle.checkpoint("ckpt_a_b32").path)


def test_what_start_up_sets(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("golden.json", "generation_config.json")
    unreadable = shutil.copytree(golden(), tmp_path / "m", ignore=ignored)
    unreadable.chmod(0o755)
    (unreadable / "generation_config.json").write_text("{")
    plain, small, given, canvas, refused, gemma = configured(
        [
            {"model": golden(), "max_num_seqs": 256},
            {"model": golden(), "max_num_seqs": 16, "max_num_batched_tokens": 48},
            {"model": golden(), "block_size": 64, "override_generation_config": {"top_p": 0.9}},
            {"model": golden(), "diffusion_config": {"canvas_length": 48}},
            {"model": str(unreadable)},
            {"model": str(MODELS["DiffusionGemma"])},
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


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_USE_V2_MODEL_RUNNER=0",
        pytest.param("VLLM_RAISE_ON_LOGIT_NANS=1", marks=pytest.mark.long),
        pytest.param("VLLM_BATCH_INVARIANT=1", marks=pytest.mark.long),
    ],
)
def test_refused_variables_of_the_environment(variable: str) -> None:
    (message,) = configured([{"model": golden()}], dict([variable.split("=")]))
    assert variable in message
