"""Starts of engines: what they fit, compile and fork, and what ends with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.support.checkpoints import ROOT, TINY_SDAR
from tests.support.child import in_child
from tests.support.children import fork_server_child
from tests.support.commands import run
from tests.support.engine import Engine, engine, greedy
from tests.support.families import FUSED

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_fitted_context_is_used_everywhere() -> None:
    """``--max-model-len auto``: vLLM fits the context into memory when the model is loaded."""
    options: dict[str, Any] = FUSED | {"block_size": 32, "max_num_seqs": 2}

    def answers(running: Engine, context: int) -> list[tuple[list[int], str]]:
        """To prompts that end just before the context, in the first window and in a later one."""
        prompts = [[(7 * i + n) % 200 for i in range(context - n)] for n in (3, 6, 30)]
        return running.generate(prompts, [greedy(500, ignore_eos=True)] * len(prompts))

    with engine(TINY_SDAR, 4, **options, max_model_len=-1, kv_cache_memory_bytes=600_000) as it:
        fitted = it.llm.llm_engine.model_config.max_model_len
        assert 32 < fitted < 512, "it is the model's whole context, or too short for the prompts"
        assert it.runner.model_state.parts.window.context == fitted
        found = answers(it, fitted)
        with pytest.raises(VLLMValidationError, match="what the context leaves"):
            it.generate([[1, 2, 3]], [greedy(500, min_tokens=fitted)])
    with engine(TINY_SDAR, 4, **options, max_model_len=fitted) as it:
        assert found == answers(it, fitted)


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llada2", "tiny-diffusiongemma", "tiny-sdar"])
def test_a_second_start_compiles_nothing(model: str, tmp_path: Path) -> None:
    """vLLM's loader failed on the CPU, and each start compiled the backbone anew."""
    caches = {"VLLM_CACHE_ROOT": tmp_path / "vllm", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "torch"}
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | {k: str(v) for k, v in caches.items()}
    command = (sys.executable, "-m", "tests.support.children.start_child", model)
    answers, logs = [], []
    for _ in range(2):
        done = run(*command, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
        logs.append(done.stdout + done.stderr)
    assert "saved AOT compiled function" in logs[0]
    assert "Directly load AOT compilation" in logs[1]
    assert "Compiling model again" not in logs[1] and "saved AOT compiled function" not in logs[1]
    assert answers[0] == answers[1]


@pytest.mark.long
@pytest.mark.parametrize("bound_to", ["0,1", "auto", "nobind"])
def test_a_forked_worker_is_bound_as_a_fresh_one(bound_to: str) -> None:
    """Processes that are forked with vLLM imported run as fresh interpreters do.

    Catches OpenMP that was loaded with the settings of another process, and a server that the
    script's own code would use.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound_to}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    environment.pop("OMP_NUM_THREADS", None)
    (forked, answer, free), (fresh, expected, _) = (
        in_child(fork_server_child.told, way, env=environment)[0] for way in ("forked", "fresh")
    )
    assert forked.pop("forked") is True and fresh.pop("forked") is False
    assert forked == fresh and free
    assert answer == expected == "92"


@pytest.mark.long
def test_what_compiles_constraints_ends_with_its_engine() -> None:
    """It begins with the first constraint; offline, constraints wait for their turn."""
    environment = dict(os.environ)
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    closed = in_child("tests.support.children.closing_child:closed", env=environment)
    assert len(closed) == 2
    loaded = closed[0]["loaded"]
    assert "vllm_dllm" in loaded and "canvas_grammar" not in loaded
    for found in closed:
        before, after = (
            any("canvas_grammar.pool_process" in command for command in found[when])
            for when in ("before", "after")
        )
        assert before and not after
        assert found["answers"] == [letter * 3 for letter in "abcdefgh"]
