"""An engine process that is killed, and checkpoints that are damaged."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import TINY
from tests.support.engine import engine, greedy
from tests.support.server import AS_SERVED, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LLADA2, GEMMA = "tiny-llada2", "tiny-diffusiongemma"
NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
# Every canvas takes some 40 steps, and a request many canvases.
SLOW = {
    LLADA2: {"diffusion_threshold": 2.0},
    GEMMA: {"diffusion_max_steps": 40, "diffusion_stability_threshold": 1000},
}
SEATS = 4
LENGTH = 8192  # longer than the models were made for, because a request is to take a minute
AT_ONCE = 10  # seconds; it takes a tenth of one
PROMPT = "sort 61 35 88 14"


def server_of(model: Path, log: Path, env: dict[str, str] | None = None) -> Server:
    longer: dict[str, Any] = {"max_position_embeddings": LENGTH}
    flags = ["--max-num-seqs", str(SEATS), "--max-model-len", str(LENGTH)]
    if model.name.startswith(GEMMA):
        longer = {"text_config": longer}
        flags += ["--limit-mm-per-prompt", json.dumps(NO_IMAGES["limit_mm_per_prompt"])]
    flags += ["--hf-overrides", json.dumps(longer)]
    return Server(model, *flags, log=log, env=env)


def until(reached: Callable[[], Any], seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, f"not reached in {seconds} s"
        time.sleep(0.02)
    return found


def engine_process(server: Server) -> int | None:
    """The id of the process in the server's group that schedules requests."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes end while we look
            name = entry.joinpath("comm").read_text()
            if "EngineCor" in name and os.getpgid(int(entry.name)) == server.process.pid:
                return int(entry.name)
    return None


def assert_nothing_left(server: Server) -> None:
    """No process of the server's group, which is all that it started."""

    def gone() -> bool:
        try:
            os.killpg(server.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    until(gone, AT_ONCE)


# ---- a killed engine process


def ask(server: Server, path: str, stream: bool, begun: threading.Event) -> tuple[str, float]:
    """How a long request ended, and when. `begun` is set by the first event of a stream."""
    slow = SLOW[Path(server.command[2]).name]
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": LENGTH - 100,
        "ignore_eos": True,
        "stream": stream,
    }
    body |= {"vllm_xargs": slow, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    body |= chat if "chat" in path else {"prompt": PROMPT}
    ended = "complete"
    try:
        with httpx.stream("POST", server.url + path, json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith('data: {"error"'):
                    ended = "error event"
                elif stream and '"choices"' in line:
                    begun.set()
        if response.status_code != 200:
            ended = str(response.status_code)
    except httpx.TransportError:
        ended = "closed"
    return ended, time.monotonic()


def begin(server: Server, pool: ThreadPoolExecutor) -> list[Future[tuple[str, float]]]:
    """Requests on every seat, some of them in a later canvas, and two that wait for a seat."""
    begun, began = threading.Event(), time.monotonic()
    ways = [(p, s) for s in (True, False) for p in ("/v1/completions", "/v1/chat/completions")]
    ways += [("/v1/completions", True), ("/v1/completions", False)]
    asked = []
    for n, (path, stream) in enumerate(ways):
        if n == SEATS:
            # For one stream, not for each: on a busy machine an event may be read 20 s after it was
            # sent. That is why the requests are so long.
            assert begun.wait(180)
            waited = time.monotonic() - began
        asked.append(pool.submit(ask, server, path, stream, begun))
    time.sleep(0.1)  # for these to reach the queue
    early = {n: future.result() for n, future in enumerate(asked) if future.done()}
    assert not early, (early, began, waited)
    return asked


def newcomer(server: Server) -> tuple[str, str]:
    """What a new request and a health check hear."""
    heard = []
    for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4} if method == "POST" else None
        try:
            answer = httpx.request(method, server.url + path, json=body, timeout=AT_ONCE)
            heard.append(str(answer.status_code))
        except httpx.NetworkError:  # not a timeout, which would be a hang
            heard.append("refused")
        except httpx.RemoteProtocolError:
            heard.append("refused")  # closed while it was sent
    return heard[0], heard[1]


@pytest.mark.long
@pytest.mark.parametrize("model", [LLADA2, GEMMA])
def test_a_killed_engine(model: str, tmp_path: Path) -> None:
    """Catches a client that waits forever, a truncated answer that looks whole, a server that
    stays up without an engine, processes that survive it, a restart that answers differently.
    The exit status is vLLM's, which is 0."""
    server = server_of(TINY / model, tmp_path / "log", AS_SERVED)
    with server, ThreadPoolExecutor(SEATS + 2) as pool:
        before = server.complete(PROMPT, 40, temperature=0, seed=7)
        asked = begin(server, pool)
        core = engine_process(server)
        assert core is not None
        killed = time.monotonic()
        os.kill(core, signal.SIGKILL)
        while server.process.poll() is None:
            request, health = newcomer(server)
            assert request in ("500", "503", "refused")
            assert health in ("503", "refused") or time.monotonic() < killed + 1
            assert time.monotonic() < killed + 30
        for future in asked:
            ended, when = future.result()
            assert ended in ("error event", "closed", "500"), ended
            assert when < killed + AT_ONCE
        assert newcomer(server) == ("refused", "refused")
        assert_nothing_left(server)
    with server:  # the same command, port included
        assert server.complete(PROMPT, 40, temperature=0, seed=7) == before


# ---- checkpoints on disk


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def sharded(model: str, target: Path) -> Path:
    """A copy whose tensors lie in two files, as those of large models do."""
    shutil.copytree(TINY / model, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    half = len(names) // 2
    for shard, part in zip(SHARDS, (names[:half], names[half:]), strict=True):
        save_file({name: tensors[name] for name in part}, target / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def cut(file: Path, keep: float) -> None:
    """Keep so many bytes, or such a share; negative: leave so many out at the end."""
    content = file.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    file.write_bytes(content[:size])


# Inside a shard's header and tensors; half of a text.
CUTS: list[tuple[str, float]] = [
    *((SHARDS[1], keep) for keep in (300, -1)),
    *((name, 0.5) for name in (INDEX, "config.json", "tokenizer.json")),
]


@pytest.mark.engine
@pytest.mark.parametrize(("file", "keep"), CUTS)
def test_a_file_that_is_cut_off(file: str, keep: float, tmp_path: Path) -> None:
    """No engine starts with a part of a checkpoint."""
    broken = sharded(LLADA2, tmp_path / LLADA2)
    cut(broken / file, keep)
    with pytest.raises(Exception):  # noqa: B017, SIM117
        with engine(broken, 32):
            pass


@pytest.mark.engine
def test_shards_that_are_whole(tmp_path: Path) -> None:
    """Else the test above would refuse what nobody cut."""
    answers = []
    for path in (TINY / LLADA2, sharded(LLADA2, tmp_path / LLADA2)):
        with engine(path, 32) as running:
            answers.append(running.generate([[5, 6, 7]], [greedy(20, ignore_eos=True)]))
    assert answers[0] == answers[1]
