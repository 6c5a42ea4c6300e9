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
