"""examples/cluster on a Ray cluster of two nodes, which are processes of this machine.

Ray is in .venv-ray (`scripts/ray.sh`, which `make test-long` calls).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from examples.tiny.tasks import held_out_set
from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.engine import engine, greedy

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

# Ray runs what anybody sends to its ports: only who has this may.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
SERVE = ROOT / "examples" / "cluster" / "ray_serve.py"
MODEL = TINY_LLADA2.name
# Of the class's name of the actors that hold an engine.
REPLICA = "LLMServer"
START_SECONDS = 300
# Lines of the log that say which replica answered a chat.
ANSWERED = re.compile(r"LLMServer\S* pid=(\d+)\).* CALL chat OK")


def environment(**more: str) -> dict[str, str]:
    # Ray's processes import vLLM: without the settings of tests that have engines in themselves.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return kept | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"} | TOKEN | more


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, Callable[[str], dict[str, Any]]]]:
    """The address of a cluster, and what kills an actor there."""
    command = [str(PYTHON), "-m", "tests.cluster.two_nodes"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes) as cluster:
        assert cluster.stdin and cluster.stdout

        def kill(name: str) -> dict[str, Any]:
            cluster.stdin.write(name + "\n")
            cluster.stdin.flush()
            return json.loads(cluster.stdout.readline())

        found = json.loads(cluster.stdout.readline())
        assert found["nodes"] == 2
        try:
            yield found["address"], kill
        finally:
            cluster.stdin.close()


def test_rows_survive_a_killed_engine(tmp_path: Path) -> None:
    """10,000 rows in, 10,000 out, answered as by an engine without Ray."""
    script, log = ROOT / "tests" / "cluster" / "rows_child.py", tmp_path / "log"
    command = [str(PYTHON), str(script), "--log", str(log)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows_in"] == found["rows_out"] == found["as_plain"] == 10_000
    assert found["lost"] == found["doubled"] == 0
    assert found["nodes"] == 2
    assert found["rows_before"] < found["rows_in"] / 2, "killed too late to matter"
    assert found["replaced_s"] and len(found["batches"]) == 3, "the replacement answered nothing"
    assert "Total Progress: " in log.read_text(), "no progress is shown"


def test_vllm_s_executor_with_ray_is_refused() -> None:
    """On the CPU; vLLM says so only in the engine's process, and then that something failed."""
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"options = {{'model': {str(TINY_LLADA2)!r}, 'distributed_executor_backend': 'ray'}}\n"
        "EngineArgs(**options).create_engine_config()"
    )
    command = [str(PYTHON), "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode != 0
    (last,) = done.stderr.splitlines()[-1:]
    assert "--distributed-executor-backend ray: on the platform cpu" in last
    assert "set it to mp" in last


class Served:
    """The example with two replicas, on two nodes."""

    def __init__(self, port: int, log: Path, kill: Callable[[str], dict[str, Any]]) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.log, self.kill = log, kill
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def ask(self, prompt: str, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": prompt}]
        options = {"model": MODEL, "max_tokens": 64} | options
        return self.client.chat.completions.create(messages=messages, **options)

    def answer(self, prompt: str) -> str:
        return self.ask(prompt).choices[0].message.content


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("ray_serve") / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with two_nodes() as (address, kill), log.open("w") as sink:
        own = environment(RAY_ADDRESS=address, RAY_DEDUP_LOGS="0")
        command = [str(PYTHON), str(SERVE), "--port", str(port)]
        example = subprocess.Popen(command, env=own, stdout=sink, stderr=sink)
        try:
            wait_until(lambda: answers(port) or example.poll() is not None, log)
            assert example.poll() is None, log.read_text()[-4000:]
            yield Served(port, log, kill)
            example.send_signal(signal.SIGINT)
            assert example.wait(60) == 0
            assert not answers(port), "the cluster goes on serving"
        finally:
            example.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200
    return False


def wait_until(holds: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)


def test_both_replicas_answer_as_one_engine(served: Served) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [problem.prompt for problem in held_out_set(4)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(served.answer, prompts * 2))
    time.sleep(3)  # until the replicas' logs are here
    assert len(set(ANSWERED.findall(served.log.read_text()))) == 2
    with engine(TINY_LLADA2, 32) as running:
        chats: Any = [[{"role": "user", "content": prompt}] for prompt in prompts]
        alone = running.llm.chat(chats, greedy(64), use_tqdm=False)
    assert found == [one.outputs[0].text for one in alone] * 2


def test_a_stream_comes_in_pieces(served: Served) -> None:
    options = {"diffusion_stream_prefix": 1, "diffusion_threshold": 1.0}
    prompt = "copy diffusion2026"
    events = served.ask(prompt, stream=True, extra_body={"vllm_xargs": options})
    pieces = [event.choices[0].delta.content for event in events if event.choices]
    pieces = [piece for piece in pieces if piece]
    assert "".join(pieces) == "diffusion2026"
    assert len(pieces) > 2


def test_a_killed_replica_is_replaced(served: Served) -> None:
    """Afterwards: what was running on it fails, as on a server that dies."""
    assert served.kill(REPLICA)["replaced_s"]
    wait_until(lambda: served_by_two(served), served.log)


def served_by_two(served: Served) -> bool:
    """Whether eight more answers come from two replicas."""
    before = len(ANSWERED.findall(served.log.read_text()))
    with contextlib.suppress(openai.APIStatusError):
        assert {served.answer("64 + 28") for _ in range(8)} == {"92"}
    time.sleep(2)
    return len(set(ANSWERED.findall(served.log.read_text())[before:])) == 2
