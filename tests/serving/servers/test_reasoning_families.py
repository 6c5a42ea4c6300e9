"""Servers of DreamReasoner, with the weights of tiny-sdar, and of openPangu-R, with random ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers.conftest import TOOLS
from tests.support import reference_openpangu
from tests.support.checkpoints import TINY_SDAR
from tests.support.random_weights import state
from tests.support.server import Pool

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ASK: list[Any] = [{"role": "user", "content": "64 + 28"}]
MASK, END = 263, 258  # of tiny-sdar's tokenizer
TOOL = {"type": "function", "function": {"name": "wait", "parameters": {
    "type": "object", "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["days"], "additionalProperties": False,
}}}  # fmt: skip


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dream") / "tiny-dream"
    shutil.copytree(TINY_SDAR, path)
    state(path, architectures=["DreamForCausalLM"], model_type="Dream")
    return path


@pytest.fixture(scope="module")
def openpangu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openpangu") / "tiny-openpangu"
    reference_openpangu.random_checkpoint(path, block=8, mask=None)
    state(path, eos_token_id=END)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_SDAR / name, path / name)
    return path


def chat(server: Any, stream: bool = False, **body: Any) -> str:
    """The text of an answer."""
    body = {"messages": ASK, "max_tokens": 24, "stream": stream} | body
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["choices"][0]["message"]["content"]
    lines = (line.removeprefix("data: ") for line in response.text.splitlines())
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return "".join(one["delta"].get("content") or "" for e in events for one in e["choices"])


def test_dreamreasoner(dream: Path, pool: Pool) -> None:
    server = pool.get(dream, *TOOLS, "hermes", "--reasoning-parser", "qwen3")
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    assert chat(server, **plain) == chat(server, stream=True, **plain) == "92"
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    for temperature in (0.0, 1.0):
        constraint = {"structured_outputs": {"json": schema}, "temperature": temperature}
        assert json.loads(chat(server, seed=1, **constraint, **plain))["n"] in (1, 2)
    asked = {"messages": ASK, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
    answer = server.post("/v1/chat/completions", **asked, **plain).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"days"}
    reported = server.complete("64 + 28", 8, logprobs=2, presence_penalty=0.5)["logprobs"]
    assert len(reported["token_logprobs"]) == len(reported["tokens"]) > 0


def test_openpangu(openpangu: Path, pool: Pool) -> None:
    server = pool.get(openpangu, "--hf-overrides", json.dumps({"mask_token_id": MASK}))
    assert chat(server, ignore_eos=True) == chat(server, stream=True, ignore_eos=True) != ""
    fast = {"diffusion_threshold": 0.2, "diffusion_sub_block_length": 4}
    chat(server, vllm_xargs=fast, temperature=1.0, seed=3)
    for name, value in {
        "logprobs": True,
        "presence_penalty": 0.5,
        "structured_outputs": {"regex": "a"},
        "logit_bias": {"5": 1.0},
    }.items():
        refused = server.post("/v1/chat/completions", messages=ASK, **{name: value})
        assert refused.status_code == 400, name
        assert f"{name} cannot be combined with this model" in refused.text
