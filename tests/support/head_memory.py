"""How much memory one denoise step of DiffusionGemma takes at the real vocabulary and canvas.

Each measurement runs in a process of its own:
``python -m tests.support.head_memory MODEL REQUESTS``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import ROOT, TEXT_ONLY_OPTIONS

VOCABULARY, CANVAS, HIDDEN = 262_144, 256, 64
MEGABYTE = 1 << 20
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


def make_model(path: Path) -> None:
    """One layer with random weights and DiffusionGemma's real vocabulary and canvas."""
    from tests.support.reference_gemma import random_checkpoint

    random_checkpoint(
        path, 0, canvas=CANVAS, vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=1
    )


def memory(name: str) -> int:
    """A line of this process' memory statistics, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def measure(model: str, requests: int) -> dict[str, int]:
    """Peak bytes of one steady denoise step over the resting process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=requests,
        max_num_batched_tokens=requests * CANVAS,
        kv_cache_memory_bytes=1 << 27,
        **TEXT_ONLY_OPTIONS,
    )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    params = SamplingParams(max_tokens=CANVAS, ignore_eos=True)
    for n in range(requests):
        prompt = [15 + (7 * n + i) % 200 for i in range(20)]
        engine.add_request(f"r{n}", {"prompt_token_ids": prompt}, params)
    for _ in range(2):  # the prompts, then a step that allocates what stays
        core.post_step(core.step_fn()[1])
    # Memory that the allocator keeps could hide what a step takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    resting = memory("VmRSS")
    core.post_step(core.step_fn()[1])
    drafts = sum(len(request.spec_token_ids) for request in core.scheduler.running)
    if drafts != requests * CANVAS:
        raise RuntimeError(f"not a steady denoise step: {drafts} canvas positions wait")
    return {"bytes": memory("VmHWM") - resting}


def in_child(model: Path, requests: int) -> dict[str, int]:
    """`measure` in a process of its own."""
    environment = os.environ | ENVIRONMENT | {"TORCH_COMPILE_DISABLE": "1"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.head_memory", str(model), str(requests)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{model}, {requests} requests failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("requests", type=int)
    args = parser.parse_args()
    print(json.dumps(measure(args.model, args.requests)))


if __name__ == "__main__":
    main()
