"""How much memory does a denoise step of DiffusionGemma take beyond the weights?

    .venv/bin/python benchmarks/head_memory.py --json benchmarks/results/head_memory.json

Serves a one-layer model with the real vocabulary (262,144 ids, canvas 256) with this package's
class, eager and compiled, and with vLLM's own, each in a process of its own, and prints the peak of
the process' memory during one steady denoise step over what it held before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)

from benchmarks.common import child, write  # noqa: E402

VOCABULARY, CANVAS, HIDDEN = 262_144, 256, 64
MEGABYTE = 1 << 20
TEXT_ONLY = {"image": 0, "video": 0}
EAGER, COMPILED, NATIVE = "vllm-dllm", "vllm-dllm, compiled", "vLLM's own class"


def make_model(path: Path) -> None:
    """One layer with random weights and DiffusionGemma's real vocabulary and canvas."""
    from tests.reference_gemma import random_checkpoint

    random_checkpoint(
        path, 0, canvas=CANVAS, vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=1
    )


def memory(name: str) -> int:
    """A line of this process' memory statistics, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def measure(model: str, requests: int, compiled: bool) -> dict[str, float]:
    """Peak bytes of one steady denoise step over the resting process, and its seconds."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=not compiled,
        max_model_len=512,
        max_num_seqs=requests,
        max_num_batched_tokens=requests * CANVAS,
        kv_cache_memory_bytes=1 << 27,
        limit_mm_per_prompt=TEXT_ONLY,
    )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    params = SamplingParams(max_tokens=CANVAS, ignore_eos=True)
    for n in range(requests):
        prompt = [15 + (7 * n + i) % 200 for i in range(20)]
        engine.add_request(f"r{n}", {"prompt_token_ids": prompt}, params)
    for _ in range(2):  # the prompts, then a step that allocates what stays
        core.post_step(core.step_fn()[1])
    # What a compiler has left behind could hide what a step takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    resting, begin = memory("VmRSS"), time.monotonic()
    core.post_step(core.step_fn()[1])
    seconds = time.monotonic() - begin
    drafts = sum(len(request.spec_token_ids) for request in core.scheduler.running)
    if drafts != requests * CANVAS:
        raise RuntimeError(f"not a steady denoise step: {drafts} canvas positions wait")
    extra = memory("VmHWM") - resting
    return {"requests": requests, "bytes": extra, "per_request": extra / requests, "s": seconds}


def in_child(model: Path, way: str, requests: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    return child(
        __file__,
        *("--child", str(model), "--requests", str(requests)),
        *(["--compiled"] if way == COMPILED else []),
        native=way == NATIVE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--native-requests", type=int, default=4, help="for vLLM's own class")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.requests, args.compiled)))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        for name, requests in (
            (EAGER, args.requests),
            (COMPILED, args.requests),
            (NATIVE, args.native_requests),
        ):
            results[name] = found = in_child(model, name, requests)
            print(
                f"{name:20}{found['requests']:5.0f} requests{found['bytes'] / MEGABYTE:10.0f} MB"
                f"{found['per_request'] / MEGABYTE:10.1f} MB a request{found['s']:8.1f} s a step"
            )
    write(args.json, "head_memory", results)


if __name__ == "__main__":
    # vLLM's class would compile for a minute, and compilation takes memory of its own. Not where a
    # test imports this: it would hold for all that its process does.
    if "--child" in sys.argv and "--compiled" not in sys.argv:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    main()
