"""The blocks of docs/clients.md that do not run beside vLLM, or are commands, on real servers.

Those of the other clients run within `make test`: see `tests/serving/servers/test_structured.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import ROOT
from tests.support.clients.servers import COMPLAINT, Block, blocks, check, misspell, serve
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

APART = ROOT / ".venv-clients" / "bin"
BLOCKS = blocks()


@pytest.fixture(scope="session", params=["llada2", "gemma"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server a family; pytest runs all tests of one before those of the next."""
    log = tmp_path_factory.mktemp(request.param) / "log"
    with serve(request.param, log) as running:
        yield running


def run(block: Block, server: Server, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run a block in an empty folder, with the commands of both environments."""
    command = [str(APART / "python"), "-c"] if block.language == "python" else ["bash", "-euc"]
    beside = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{APART}:{beside}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "hub"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # its list of prices is on the network otherwise
    }
    text = block.at(server.url, str(server.command[2]))
    return subprocess.run(
        [*command, text], capture_output=True, text=True, env=environment, cwd=scratch
    )


def succeed(client: str, server: Server, scratch: Path) -> str:
    ended = run(BLOCKS[client], server, scratch)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    return ended.stdout


def variant(client: str, *changes: tuple[str, str]) -> Block:
    block = BLOCKS[client]
    for old, new in changes:
        assert old in block.text
        block = block._replace(text=block.text.replace(old, new))
    return block


def only(scratch: Path, pattern: str) -> Any:
    (path,) = scratch.glob(pattern)
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("client", ["LiteLLM", "Instructor", "Outlines"])
def test_a_client_of_python(server: Server, client: str, tmp_path: Path) -> None:
    check(succeed(client, server, tmp_path))


@pytest.mark.parametrize("client", ["LiteLLM", "Instructor", "Outlines", "lm-eval"])
def test_a_misspelt_option_is_refused(server: Server, client: str, tmp_path: Path) -> None:
    ended = run(misspell(BLOCKS[client]), server, tmp_path)
    assert ended.returncode != 0
    assert COMPLAINT in ended.stderr


def test_litellm_s_other_provider(server: Server, tmp_path: Path) -> None:
    ended = run(variant("LiteLLM", ("hosted_vllm/", "openai/")), server, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check(ended.stdout)


def test_lm_eval(server: Server, tmp_path: Path) -> None:
    succeed("lm-eval", server, tmp_path)
    for kind in ("chat", "completions"):
        assert only(tmp_path, f"{kind}*.json")["results"]["sums"]["exact_match,none"] == 1


def test_lm_eval_hands_on_constraints(server: Server, tmp_path: Path) -> None:
    constraint = "until: [], structured_outputs: {regex: '7[0-9]'}"
    block = variant(
        "lm-eval",
        ('until: ["\\n"], vllm_xargs: {diffusion_max_steps: 8}', constraint),
        ("--output_path", "--log_samples --output_path"),
    )
    files, chat, _ = block.text.split("\nlm_eval ")
    ended = run(block._replace(text=f"{files}\nlm_eval {chat}"), server, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (samples,) = tmp_path.glob("samples*.jsonl")
    for line in samples.read_text("utf-8").splitlines():
        assert re.fullmatch("7[0-9]", json.loads(line)["resps"][0][0])


def test_lm_eval_s_likelihoods_are_refused(server: Server, tmp_path: Path) -> None:
    """They need the probability of a prompt's tokens given those before, which there is not."""
    choices = "multiple_choice\ndoc_to_choice: ['46', '92']"
    block = variant("lm-eval", ("generate_until", choices), ('"{{answer}}"', "0"))
    files, _, completions = block.text.split("\nlm_eval ")
    ended = run(block._replace(text=f"{files}\nlm_eval {completions}"), server, tmp_path)
    assert ended.returncode != 0
    assert "echo with logprobs is not supported with diffusion models" in ended.stderr


def requests_of_guidellm(scratch: Path) -> dict[str, Any]:
    (benchmark,) = only(scratch, "guidellm.json")["benchmarks"]
    return {kind: found for kind, found in benchmark["requests"].items() if found}


def test_guidellm(server: Server, tmp_path: Path) -> None:
    succeed("guidellm", server, tmp_path)
    (found,) = requests_of_guidellm(tmp_path).items()
    assert found[0] == "successful" and len(found[1]) == 8


def test_guidellm_hands_on_options(server: Server, tmp_path: Path) -> None:
    assert run(misspell(BLOCKS["guidellm"]), server, tmp_path).returncode == 0
    assert list(requests_of_guidellm(tmp_path)) == ["errored"]


def test_guidellm_calls_tools(server: Server, tmp_path: Path) -> None:
    longer = ("output_tokens=32", "output_tokens=100,tool_call_turns=1")
    run(variant("guidellm", longer), server, tmp_path)
    found = requests_of_guidellm(tmp_path)["successful"]
    calls = [call for request in found for call in request["tool_calls"] or ()]
    assert len(found) == 8 and len(calls) == 4
    for call in calls:
        assert isinstance(json.loads(call["function"]["arguments"])["query"], str)


def test_vllm_chat(server: Server, tmp_path: Path) -> None:
    output = succeed("`vllm chat` and `vllm complete`", server, tmp_path)
    assert "> 92\n" in output
    assert "tokens/s" in output


def test_vllm_bench(server: Server, tmp_path: Path) -> None:
    succeed("`vllm bench serve`", server, tmp_path)
    assert only(tmp_path, "bench.json")["completed"] == 8


def test_vllm_bench_hands_on_options(server: Server, tmp_path: Path) -> None:
    run(misspell(BLOCKS["`vllm bench serve`"]), server, tmp_path)
    assert only(tmp_path, "bench.json")["failed"] == 8
