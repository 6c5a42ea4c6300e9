"""Helpers of the scripts for a bare GPU machine: its ceilings, timing, and the record.

They need torch and Triton, and nothing else of what the package depends on.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
# Written before each timed run, so that nothing is left in a cache; several times an L2 cache.
FLUSH_BYTES = 512 << 20
# Cycles of the device's clock, about two milliseconds.
AHEAD_CYCLES = 4_000_000


@dataclass(frozen=True)
class Machine:
    """A GPU and what it reached here.

    Attributes:
        name: of the device.
        multiprocessors, l2_bytes: of the device, 0 where torch does not say.
        copy_bytes_per_s: bytes read plus bytes written of a large copy within its memory.
        matrix_flops_per_s: of a large bfloat16 matrix product of random numbers, by torch.
        versions: of Python, torch, Triton, CUDA and this package.
    """

    name: str
    multiprocessors: int
    l2_bytes: int
    copy_bytes_per_s: float
    matrix_flops_per_s: float
    versions: Mapping[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.name}: copies {self.copy_bytes_per_s / 1e12:.2f} TB/s, "
            f"multiplies {self.matrix_flops_per_s / 1e12:.0f} TFLOP/s in bfloat16 ({versions})"
        )


def require_gpu(quick: bool = False) -> torch.device:
    """The device to run on.

    Without a GPU that is the CPU if `quick` is set and kernels are interpreted. Otherwise this says
    what is missing and ends the process with code 2.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if quick and os.environ.get("TRITON_INTERPRET") == "1":
        print("No GPU: kernels are interpreted, answers are checked, nothing is timed.")
        return torch.device("cpu")
    print(
        f"{Path(sys.argv[0]).name} needs a CUDA GPU, and torch sees none: no figure was taken.\n"
        "With TRITON_INTERPRET=1 and --quick it checks tiny shapes on the CPU.",
        file=sys.stderr,
    )
    sys.exit(2)


def measure() -> Machine:
    """The machine, with its ceilings."""
    from vllm_dllm import __version__

    properties = torch.cuda.get_device_properties(0)
    return Machine(
        name=properties.name,
        multiprocessors=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", 0),
        copy_bytes_per_s=_copy_rate(),
        matrix_flops_per_s=_matrix_rate(),
        versions={
            "vllm-dllm": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": str(torch.version.cuda),
        },
    )


def _copy_rate() -> float:
    """Bytes read and written a second, by a copy of 4 GiB."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / time_ms(lambda: target.copy_(source)) * 1e3


def _matrix_rate() -> float:
    """Operations a second, by a product of 8192 x 8192 x 8192 random bfloat16 numbers."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    return 2 * n**3 / time_ms(lambda: a @ b) * 1e3


def time_ms(run: Callable[[], Any], repeats: int = 25, warm_up: int = 5) -> float:
    """Milliseconds of `run` on the GPU: the median over repeats, each with cold caches.

    The device is kept busy for a while before each, so that `run` can launch its kernels behind
    one another: the time is the device's, not that of launching, as long as launching takes no
    more than `AHEAD_CYCLES`.
    """
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        _flushed().zero_()
        torch.cuda._sleep(AHEAD_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@cache
def _flushed() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def write_json(path: Path, machine: Machine, rows: Mapping[str, Any]) -> None:
    """Write results with what is needed to reproduce them."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    words = [name, *(word.replace(f"{ROOT}/", "") for word in sys.argv[1:])]
    record = {"command": " ".join(words), "machine": asdict(machine), "results": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
