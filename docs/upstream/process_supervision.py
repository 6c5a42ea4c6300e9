"""Shows faults of vLLM's processes on vLLM alone; docs/upstream/process_supervision.md has them.

    python docs/upstream/process_supervision.py exit-status

Run in this repository, whose tests have a tiny Llama. Everything runs on this machine, on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

START_SECONDS = 300
PLAIN = {
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
}
FLAGS = ("--enforce-eager", "--max-model-len=256", f"--kv-cache-memory-bytes={1 << 26}")


class Server:
    """A ``vllm serve`` without plugins."""

    def __init__(self, folder: Path, name: str, model: Path, *flags: str) -> None:
        self.log = folder / f"{name}.log"
        self.port = free_port()
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *FLAGS, *flags]
        if "--headless" not in flags:
            command += ["--host=127.0.0.1", f"--port={self.port}"]
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=sink, env=os.environ | PLAIN, start_new_session=True
            )

    def health(self) -> int | None:
        """The status of ``/health``; None if nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def child(self, name: str) -> int:
        """The id of a process of the server by the beginning of vLLM's name for it."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # processes end while this looks
                of_server = os.getpgid(int(entry.name)) == self.process.pid
                if of_server and entry.joinpath("cmdline").read_text().startswith(name):
                    return int(entry.name)
        raise LookupError(f"no process {name}")

    def kill(self) -> None:
        """End all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(reached: Callable[[], bool], seconds: float) -> bool:
    """Whether it was reached in time."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextlib.contextmanager
def tiny_llama() -> Iterator[tuple[Path, Path]]:
    """A folder for logs, and an ordinary model with random weights."""
    from tests.support.tiny_llama import write_tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_llama(model, 272, 2048, bos_token_id=256, eos_token_id=257)
        source = ROOT / "examples/tiny/checkpoints/tiny-llada2"
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(source / name, model / name)
        yield Path(folder), model


def exit_status() -> None:
    """A server whose engine is killed."""
    with tiny_llama() as (folder, model):
        server = Server(folder, "server", model)
        try:
            assert wait(lambda: server.health() == 200, START_SECONDS), server.log.read_text()
            os.kill(server.child("VLLM::EngineCore"), signal.SIGKILL)
            server.process.wait(60)
            print(f"engine killed; the server ended with exit status {server.process.returncode}")
        finally:
            server.kill()


def waiting_worker() -> None:
    """A start that fails, with a worker that loses the exception which SIGTERM raises in it."""
    with tiny_llama() as (folder, model):
        worker = "docs.upstream.lingering_worker.LingeringWorker"
        server = Server(folder, "server", model, f"--worker-cls={worker}")
        try:
            failed = wait(lambda: "EngineCore failed" in server.log.read_text(), START_SECONDS)
            assert failed, server.log.read_text()
            ended = wait(lambda: server.process.poll() is not None, 60)
            print(f"the engine failed to start; 60 s later the server has ended: {ended}")
        finally:
            server.kill()


def damaged_file() -> None:
    """A checkpoint whose weights are cut off."""
    with tiny_llama() as (folder, model):
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        server = Server(folder, "server", model)
        try:
            server.process.wait(START_SECONDS)
            log = server.log.read_text()
            print(*[line for line in log.splitlines() if "SafetensorError" in line][-1:])
            print(f"the log names {file.name}: {file.name in log}")
        finally:
            server.kill()


def unreachable_image() -> None:
    """What vLLM's server makes of images that it cannot have."""
    os.environ.update(PLAIN, VLLM_MEDIA_FETCH_MAX_RETRIES="1")
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.multimodal.media.connector import MediaConnector
    from vllm.multimodal.media.image import ImageMediaIO

    app = FastAPI()
    app.state.args = argparse.Namespace(log_error_stack=False)
    init_exception_handler(app)

    @app.get("/")
    async def fetch(url: str) -> None:
        await MediaConnector().load_from_url_async(url, ImageMediaIO())

    client = TestClient(app, raise_server_exceptions=False)
    for url in ("http://127.0.0.1:9/x.png", "file:///nowhere/x.png", "data:image/png,abc"):
        print(f"{url}: status {client.get('/', params={'url': url}).status_code}")


def second_node() -> None:
    """An engine on two nodes, of which the second is killed."""
    with tiny_llama() as (folder, model):
        common = ("--tensor-parallel-size=2", "--nnodes=2", "--master-addr=127.0.0.1")
        common += (f"--master-port={free_port()}",)
        first = Server(folder, "first", model, *common, "--node-rank=0")
        second = Server(folder, "second", model, *common, "--node-rank=1", "--headless")
        try:
            assert wait(lambda: first.health() == 200, START_SECONDS), first.log.read_text()
            second.kill()
            noticed = wait(lambda: first.health() != 200, 60)
            print(f"second node killed; 60 s later /health of the first notices it: {noticed}")
        finally:
            first.kill()
            second.kill()


FAULTS = {
    "exit-status": exit_status,
    "waiting-worker": waiting_worker,
    "damaged-file": damaged_file,
    "unreachable-image": unreachable_image,
    "second-node": second_node,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    FAULTS[parser.parse_args().fault]()
