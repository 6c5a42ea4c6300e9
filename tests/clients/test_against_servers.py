"""The blocks of docs/clients.md that do not run beside vLLM, or are commands, on real servers.

Those of the other clients run within `make test`: tests/e2e/test_frameworks.py and test_gemma.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.page import ROOT, Block, blocks
from tests.clients.servers import COMPLAINT, check, misspell
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

APART = ROOT / ".venv-clients" / "bin"
BLOCKS = blocks()


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


def only(scratch: Path, pattern: str) -> Any:
    """The content of the one file of JSON that a command has written."""
    (path,) = scratch.glob(pattern)
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("client", ["LiteLLM", "Instructor", "Outlines"])
def test_a_client_of_python(server: Server, client: str, tmp_path: Path) -> None:
    check(succeed(client, server, tmp_path))


@pytest.mark.parametrize("client", ["LiteLLM", "Instructor", "Outlines"])
def test_a_misspelt_option_is_refused(server: Server, client: str, tmp_path: Path) -> None:
    """So the client hands on the options of this package."""
    ended = run(misspell(BLOCKS[client]), server, tmp_path)
    assert ended.returncode != 0
    assert COMPLAINT in ended.stderr


def test_lm_eval(server: Server, tmp_path: Path) -> None:
    """Both kinds of model answer the two sums of the page's task."""
    succeed("lm-eval", server, tmp_path)
    for kind in ("chat", "completions"):
        assert only(tmp_path, f"{kind}*.json")["results"]["sums"]["exact_match,none"] == 1


def test_lm_eval_hands_on_options(server: Server, tmp_path: Path) -> None:
    ended = run(misspell(BLOCKS["lm-eval"]), server, tmp_path)
    assert ended.returncode != 0
    assert COMPLAINT in ended.stderr


def test_lm_eval_s_likelihoods_are_refused(server: Server, tmp_path: Path) -> None:
    """They need the probability of a prompt's tokens given those before, which there is not."""
    block = BLOCKS["lm-eval"]
    choices = block.text.replace("generate_until", "multiple_choice\ndoc_to_choice: ['46', '92']")
    files, _, completions = choices.split("\nlm_eval ")
    only_completions = f"{files}\nlm_eval {completions}"
    ended = run(block._replace(text=only_completions), server, tmp_path)
    assert ended.returncode != 0
    assert "prompt_logprobs is not supported with diffusion models" in ended.stderr


def test_guidellm(server: Server, tmp_path: Path) -> None:
    succeed("guidellm", server, tmp_path)
    (benchmark,) = only(tmp_path, "guidellm.json")["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 8


def test_vllm_chat(server: Server, tmp_path: Path) -> None:
    output = succeed("`vllm chat` and `vllm complete`", server, tmp_path)
    assert output.count("92") == 2 and "46" in output
    assert "tokens/s" in output


def test_vllm_bench(server: Server, tmp_path: Path) -> None:
    succeed("`vllm bench serve`", server, tmp_path)
    assert only(tmp_path, "bench.json")["completed"] == 8
