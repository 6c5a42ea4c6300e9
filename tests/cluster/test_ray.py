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
from collections.abc import Iterator
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
START_SECONDS = 300
# Lines of the log with the process that has answered a batch, or a chat.
BATCH = re.compile(r"pid=(\d+)\).* Elapsed time for batch")
ANSWERED = re.compile(r"LLMServer\S* pid=(\d+)\).* CALL chat OK")


def environment(**more: str) -> dict[str, str]:
    # Ray's processes import vLLM: without the settings of tests that have engines in themselves.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return kept | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"} | TOKEN | more


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a cluster."""
    command = [str(PYTHON), "-m", "tests.cluster.two_nodes"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes) as cluster:
        assert cluster.stdin and cluster.stdout
        try:
            yield cluster.stdout.readline().strip()
        finally:
            cluster.stdin.close()


def test_rows_survive_a_killed_engine(tmp_path: Path) -> None:
    """10,000 rows in, 10,000 out, answered as by an engine without Ray."""
    command = [str(PYTHON), "-m", "tests.cluster.rows_child", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found, log = json.loads(done.stdout.splitlines()[-1]), (tmp_path / "log").read_text()
    assert found["status"] == 0, log[-3000:]
    assert found["nodes"] == 2
    assert found["rows_before"] < 5_000, "killed too late to matter"
    assert found["replaced"] and len(set(BATCH.findall(log))) == 3, "the replacement is idle"
    assert "Total Progress: " in log, "no progress is shown"
    rows = sorted(found["rows"], key=lambda row: row["id"])
    assert [row["id"] for row in rows] == [*range(10_000)], "rows are lost or doubled"
    alone = plain([row["prompt"] for row in rows], max_num_seqs=256)
    assert [row["answer"] for row in rows] == alone


def plain(prompts: list[str], **options: Any) -> list[str]:
    """The answers of one engine without Ray, all asked at once."""
    chats: Any = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with engine(TINY_LLADA2, 32, **options) as running:
        return [one.outputs[0].text for one in running.llm.chat(chats, greedy(64), use_tqdm=False)]


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

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.log = log
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
    with two_nodes() as address, log.open("w") as sink:
        own = environment(RAY_ADDRESS=address, RAY_DEDUP_LOGS="0")
        command = [str(PYTHON), str(SERVE), "--port", str(port)]
        example = subprocess.Popen(command, env=own, stdout=sink, stderr=sink)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(port):
                alive = example.poll() is None and time.monotonic() < deadline
                assert alive, log.read_text()[-4000:]
                time.sleep(0.5)
            yield Served(port, log)
            example.send_signal(signal.SIGINT)
            assert example.wait(60) == 0
            assert not answers(port), "the cluster goes on serving"
        finally:
            example.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200
    return False


def test_both_replicas_answer_as_one_engine(served: Served) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [problem.prompt for problem in held_out_set(4)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(served.answer, prompts * 2))
    time.sleep(3)  # until the replicas' logs are here
    assert len(set(ANSWERED.findall(served.log.read_text()))) == 2
    assert found == plain(prompts) * 2


def test_a_stream_comes_in_pieces(served: Served) -> None:
    options = {"diffusion_stream_prefix": 1, "diffusion_threshold": 1.0}
    prompt = "copy diffusion2026"
    events = served.ask(prompt, stream=True, extra_body={"vllm_xargs": options})
    pieces = [event.choices[0].delta.content for event in events if event.choices]
    pieces = [piece for piece in pieces if piece]
    assert "".join(pieces) == "diffusion2026"
    assert len(pieces) > 2
