"""Clients that cannot be installed beside vLLM, in an environment of their own.

LiteLLM and Instructor ask for older versions of what vLLM and OpenAI's client need.
``make test-clients`` makes the environment and runs these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("server") / "log"
    checkpoint = ROOT / "examples" / "tiny" / "checkpoints" / "tiny-llada2"
    with Server(checkpoint, *flags, log=log) as running:
        yield running


@pytest.mark.parametrize("client", ["litellm", "instructor"])
def test_what_a_client_returns_is_valid(server: Server, client: str) -> None:
    """By a format, and by a call of a tool."""
    script = ROOT / "tests" / "support" / f"client_{client}.py"
    # LiteLLM reads its list of prices from the network otherwise.
    environment = {"PATH": os.environ["PATH"], "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = subprocess.run(
        [PYTHON, script, f"{server.url}/v1"], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert len(found) >= 2
    for person in found:
        jsonschema.validate(json.loads(person), PERSON)
