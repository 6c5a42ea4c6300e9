"""How long ``vllm serve`` takes from the command to its first answer, the first time and later.

    .venv/bin/python benchmarks/start_up.py --json benchmarks/results/start_up.json

The first start of each model finds empty caches: nothing is compiled, and vLLM has not inspected
the model's class. The later starts find what the first one left. All flags are vLLM's defaults but
for the length of a request and the size of the KV cache, which on a CPU would take all memory.
``--eager`` adds starts with ``--enforce-eager``, which compile nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402

TINY = ROOT / "examples" / "tiny" / "checkpoints"
MODELS = ("tiny-llada2", "tiny-sdar", "tiny-diffusiongemma")
FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "256M")
LIMIT_S = 300


@contextlib.contextmanager
def serving(model: str, folder: Path, flags: tuple[str, ...]) -> Iterator[str]:
    """Start a server; its address, at once. It is stopped when the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    vllm = str(Path(sys.executable).with_name("vllm"))
    address = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m")
    # PyTorch keeps its precompiled header in the folder of temporary files.
    caches = {"VLLM_CACHE_ROOT": folder / "vllm", "TMPDIR": folder}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [vllm, "serve", str(TINY / model), *address, *FLAGS, *flags],
            stdout=log,
            stderr=log,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | {k: str(v) for k, v in caches.items()},
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def seconds(model: str, folder: Path, flags: tuple[str, ...]) -> dict[str, float]:
    """Seconds until a server is ready, and until it has answered its first request."""
    begin = time.perf_counter()
    with serving(model, folder, flags) as url:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            if time.perf_counter() - begin > LIMIT_S:
                raise RuntimeError((folder / "log").read_text()[-3000:])
            time.sleep(0.1)
        ready = time.perf_counter() - begin
        messages = [{"role": "user", "content": "64 + 28"}]
        body = json.dumps({"model": "m", "max_tokens": 16, "messages": messages}).encode()
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, header)
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        if answer != "92":
            raise RuntimeError(f"{model} answered {answer!r}")
        return {"ready": ready, "answered": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--later", type=int, default=2, help="starts after the first")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    ways: dict[str, tuple[str, ...]] = {"default": ()}
    if args.eager:
        ways["eager"] = ("--enforce-eager",)
    results: dict[str, Any] = {}
    for model in args.models:
        for way, flags in ways.items():
            with tempfile.TemporaryDirectory(prefix="vllm-dllm-start-") as folder:
                runs = [seconds(model, Path(folder), flags) for _ in range(1 + args.later)]
            results[f"{model}, {way}"] = runs
            shown = "  ".join(f"{run['ready']:5.1f}" for run in runs)
            print(f"{model:22} {way:8} ready after {shown} s", flush=True)
    write(args.json, "start_up", results)


if __name__ == "__main__":
    main()
