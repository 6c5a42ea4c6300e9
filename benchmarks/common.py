"""Helpers of all benchmarks, and the record of command, code and machine that each one writes."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def quiet_engines() -> None:
    """Default to one thread, warnings only and no hub. Call this before vLLM is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def engines_in_this_process() -> None:
    """As `quiet_engines`; also keep the engine's core and worker in this process for inspection."""
    quiet_engines()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1"
    )


def write(path: Path | None, benchmark: str, results: Mapping[str, Any]) -> None:
    """Write `results` as JSON with what is needed to reproduce them; without a path, do nothing."""
    if path is None:
        return
    record = {"benchmark": benchmark, **surroundings(), "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def environment(native: bool) -> dict[str, str]:
    """Environment of a child process; `native` leaves DiffusionGemma to vLLM's own class."""
    return os.environ | {"VLLM_DLLM_NATIVE": "1" if native else "0"}


def child(script: str, *arguments: str, native: bool = False) -> Any:
    """What a benchmark prints, in a process of its own: the last line, which is JSON.

    `native` as in `environment`.
    """
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment(native),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def mixed_problems(per_task: int) -> list[Any]:
    """Held-out problems of all tasks in a mixed order, as users would send them."""
    from examples.tiny.tasks import held_out_set

    problems = held_out_set(per_task)
    return [problem for n in range(per_task) for problem in problems[n::per_task]]


def in_flight(
    engine: Any, prompts: Iterable[Any], params: Any, at_once: int
) -> Iterator[tuple[int, float, Any]]:
    """Keep a number of prompts in an engine; yields number, seconds and output of each that ends.

    A prompt is taken from the iterable when there is room for it.
    """
    waiting, submitted = enumerate(prompts), dict[int, float]()
    while True:
        for number, prompt in itertools.islice(waiting, at_once - len(submitted)):
            engine.add_request(str(number), prompt, params)
            submitted[number] = time.monotonic()
        if not submitted:
            return
        for output in engine.step():
            if output.finished:
                number = int(output.request_id.split("-")[0])
                yield number, time.monotonic() - submitted.pop(number), output


def surroundings() -> dict[str, Any]:
    """The command line, the commit (and whether the tree differs), versions, the machine.

    `load_average` is the machine's over 1, 5 and 15 minutes when the benchmark ends, itself
    included. `written` is the time in UTC. Older files lack these two fields.
    """
    import torch
    import transformers

    from vllm_dllm import __version__
    from vllm_dllm.vllm_seams import versions

    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return {
        "command": " ".join([name, *(_public(word) for word in sys.argv[1:])]),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {
            "vllm-dllm": __version__,
            "vllm": versions.vllm_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "cpu": _processor(),
            "cores": os.cpu_count(),
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or None,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _public(word: str) -> str:
    """A word of the command line, without the path of this checkout."""
    return word.replace(f"{ROOT}/", "")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def with_equal_steps(model: Path, copy: Path, steps: int) -> Path:
    """A copy of a DiffusionGemma checkpoint that takes so many denoise steps for every canvas.

    Early stopping is switched off, because with it the number of steps would be random: vLLM's own
    class takes no seed.
    """
    shutil.copytree(model, copy)
    path = copy / "generation_config.json"
    config = json.loads(path.read_text())
    config |= {"max_denoising_steps": steps, "confidence_threshold": 1e-30}
    path.write_text(json.dumps(config))
    return copy


class Progress:
    """One line that renews itself; where the output is a file, a line every ten seconds."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.begin = self.said = time.monotonic()

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        now, terminal = time.monotonic(), sys.stdout.isatty()
        last = self.done == self.total
        if now - self.said < (0.2 if terminal else 10.0) and not last:
            return
        self.said = now
        text = f"{self.label}: {self.done} of {self.total}, {now - self.begin:.0f} s"
        print(f"\r\033[K{text}" if terminal else text, end="\n" if last or not terminal else "")
        sys.stdout.flush()
