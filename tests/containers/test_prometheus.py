"""A real Prometheus scrapes a real server, and every expression of the dashboard has data.

Debian's package `prometheus` is enough; without it in PATH these tests are skipped.
"""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import TINY_GEMMA, TINY_LLADA2
from tests.support.dashboard import MONITORING, expressions
from tests.support.server import Server

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
CONFIG = (MONITORING / "prometheus.yml").read_text("utf-8")
LOAD_SECONDS, REQUESTS_AT_A_TIME = 15, 8

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="needs prometheus and promtool"),
]


@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", str(MONITORING / "prometheus.yml")),  # the rules, too
        ("test", "rules", str(Path(__file__).parent / "alerts_test.yml")),
    ],
    ids=["configuration", "alerts"],
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", params=[TINY_LLADA2, TINY_GEMMA], ids=lambda path: path.name)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(request.param, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus with the compose file's configuration and another target."""
    scratch = tmp_path_factory.mktemp("prometheus")
    assert "server:8000" in CONFIG
    config = CONFIG.replace("server:8000", f"127.0.0.1:{server.port}")
    (scratch / "prometheus.yml").write_text(config.replace("interval: 5s", "interval: 1s"))
    shutil.copy(MONITORING / "alerts.yml", scratch)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = (
        f"--config.file={scratch / 'prometheus.yml'}",
        f"--storage.tsdb.path={scratch / 'data'}",
        f"--web.listen-address={address}",
    )
    with (scratch / "log").open("w") as sink:
        process = subprocess.Popen([PROMETHEUS, *flags], stdout=sink, stderr=sink)
    try:
        wait_until_ready(f"http://{address}", process, scratch / "log")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(150):
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/-/ready", timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"Prometheus did not start:\n{log.read_text()[-2000:]}")


def load(server: Server) -> None:
    """Requests of several blocks, streamed and whole, and some that are refused."""
    deadline = time.monotonic() + LOAD_SECONDS
    content = "copy diffusion2026"

    def ask(number: int) -> None:
        while time.monotonic() < deadline:
            body = {"messages": [{"role": "user", "content": content}], "ignore_eos": True}
            body |= {"max_tokens": 400, "stream": number % 2 == 0}
            assert server.post("/v1/chat/completions", **body).status_code == 200
            refused = body | {"vllm_xargs": {"diffusion_no_such_option": 1}}
            assert server.post("/v1/chat/completions", **refused).status_code == 400

    with ThreadPoolExecutor(REQUESTS_AT_A_TIME) as pool:
        list(pool.map(ask, range(REQUESTS_AT_A_TIME)))


def query(prometheus: str, expression: str) -> list[float]:
    """The value of each series that an expression has now."""
    response = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}, timeout=10)
    assert response.status_code == 200, response.text
    return [float(sample["value"][1]) for sample in response.json()["data"]["result"]]


def test_every_expression_has_data(server: Server, prometheus: str) -> None:
    """While requests run."""
    with ThreadPoolExecutor(1) as aside:
        loading = aside.submit(load, server)
        time.sleep(LOAD_SECONDS - 5)
        found = [(*asked, query(prometheus, asked[1])) for asked in expressions()]
        loading.result()
    for title, expression, values in found:
        print(f"{title}: {values}\n    {expression}")  # shown by pytest -s
        assert values, (title, expression)
        assert all(map(math.isfinite, values)), (title, expression, values)
    # Requests of a tiny model are short: a single scrape may find none.
    for gauge in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        (most,) = query(prometheus, f"max_over_time({gauge}[{LOAD_SECONDS}s])")
        assert most > 0, gauge
