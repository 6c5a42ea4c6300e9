"""The plugin harms no other model: an ordinary causal one answers as it does without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.reference_llada2 import write_tokenizer
from tests.support.server import Server
from tests.support.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {"seed": 1},
    "sampled": {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0, "presence_penalty": 1.0, "logit_bias": {"5": 1.0}},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "two-greedy": {"temperature": 0, "n": 2},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_tiny_llama(path, 300, 512)
    write_tokenizer(path, 300, None)
    return path


def answers(model: Path, log: Path, env: dict[str, str] | None) -> dict[str, Any]:
    with Server(model, log=log, env=env) as server:
        found = {}
        for name, options in REQUESTS.items():
            body = {"prompt": [5, 6, 7, 8], "max_tokens": 20, "ignore_eos": True}
            response = server.post("/v1/completions", return_token_ids=True, **body, **options)
            content = response.json()
            kept = [(c["token_ids"], c["logprobs"]) for c in content.get("choices", ())]
            found[name] = (response.status_code, kept)
        return found


def test_same_answers_with_and_without(llama: Path, tmp_path: Path) -> None:
    without = answers(llama, tmp_path / "without.log", {"VLLM_PLUGINS": ""})
    with_plugin = answers(llama, tmp_path / "with.log", None)
    assert with_plugin == without
    assert [status for status, _ in without.values()] == [200, 200, 200, 200, 200, 400]
    # Both really ran as they should have: vLLM's CPU runner, and ours loaded in one of them.
    assert "V2 Model Runner" not in (tmp_path / "with.log").read_text()


UNSUPPORTED = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from vllm_dllm import plugin
from vllm_dllm.vllm_seams import versions
versions.vllm_version = lambda: "0.99.0"
plugin.register()
plugin.register()
from vllm.engine.arg_utils import EngineArgs
from vllm import ModelRegistry
limits = "_set_default_max_num_seqs_and_batched_tokens_args"
assert not hasattr(getattr(EngineArgs, limits), "__wrapped__")
assert "LLaDA2MoeModelLM" not in ModelRegistry.get_supported_archs()
EngineArgs(model=sys.argv[1], max_model_len=256).create_engine_config()
print("alive")
"""


def test_unknown_vllm_version_warns_and_touches_nothing(llama: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", UNSUPPORTED, str(llama)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"VLLM_PLUGINS": ""},
    )
    assert child.stdout.splitlines()[-1:] == ["alive"], child.stderr[-2000:]
    assert child.stderr.count("vllm-dllm is inactive: vLLM 0.99.0 is not supported") == 1
