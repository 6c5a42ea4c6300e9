"""The command ``vllm-dllm selftest``: run each case in a separate process, judge it, report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_dllm import __version__
from vllm_dllm.selftest.cases import FAMILIES, Case, absent, cases_of
from vllm_dllm.selftest.golden import judge, load

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
PACKAGES = ("vllm", "torch", "triton", "transformers", "flashinfer-python")
CASE_SECONDS = 300.0  # most of them take less than a minute
LOG_LINES = 40  # of a failed case
# The most memory that a case takes, on a GPU and on a host.
GPU_BYTES, HOST_BYTES = 3 << 30, 6 << 30
MOST_JOBS = 8


class ChildError(RuntimeError):
    """A case has no answer; `log` has the last lines of its log."""

    def __init__(self, reason: str, log: list[str]) -> None:
        super().__init__(reason)
        self.log = log


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--list", action="store_true", help="show the cases of this machine; run nothing")
    add("--only", metavar="TEXT", default="", help="the cases whose name has this text")
    add("--json", type=Path, metavar="FILE", help="write everything here: the file to send us")
    add("--bench", action="store_true", help="time what runs beside a model, instead of the cases")
    add("--jobs", type=int, metavar="N", help="processes at a time")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 if a case failed or none has the name."""
    if args.bench:
        return run_bench(args)
    from vllm_dllm.attention.served_route import device_here

    device = device_here()
    every = cases_of(device, fp8_cache(), old_compiler())
    cases = [case for case in every if args.only in case.name]
    lacking = [f"{what}: {why}" for what, why in absent(device, old_compiler())]
    print(f"{device}: {len(cases)} of {len(every)} cases")
    if args.list:
        print("\n".join([*(case.name for case in cases), "not here:", *lacking]))
        return 0
    begin, results = time.monotonic(), []
    with ThreadPoolExecutor(args.jobs or jobs(device.platform)) as pool:
        for done in as_completed([pool.submit(examine, case) for case in cases]):
            result = done.result()
            results.append(result)
            seconds, name = f"{result['seconds']:4.0f} s", result["case"]["name"]
            print(f"{result['result']:6} {seconds}  {name}  {result['summary']}", flush=True)
            record = {
                "seconds": round(time.monotonic() - begin, 1),
                "machine": asdict(device) | {"flash_versions": sorted(device.flash_versions)},
                "cases": results,
                "not_here": lacking,
            }
            write(record, args.json)  # a run that is cut off leaves what it has found
    failed = sum(result["result"] == "FAILED" for result in results)
    print("\n".join(["not here:", *lacking]))
    print(f"{len(results) - failed} passed, {failed} FAILED")
    if args.json is not None:
        print(f"written: {args.json}")
    return 1 if failed or not cases else 0


def run_bench(args: argparse.Namespace) -> int:
    """Print a table of the times of steps beside a model, see `selftest.steps`."""
    from vllm_dllm.selftest.steps import bench

    rows = []
    columns = {"ms": "ms", "host_ms": "host", "idle_ms": "idle", "kernels": "kernels"}
    print(" ".join(f"{title:>7}" for title in columns.values()), " requests  step")
    for row in bench():
        rows.append(row)
        # Only a GPU has the last two.
        times = " ".join(f"{row[key]:7.2f}" if key in row else " " * 7 for key in columns)
        print(f"{times}  {row['requests']:8}  {row['model']}: {row['step']}", flush=True)
        write({"steps": rows}, args.json)
    return 0


def write(record: dict[str, Any], file: Path | None) -> None:
    """Write what was found, and on which machine, if a file is wanted."""
    from vllm.platforms import current_platform

    if file is not None:
        record |= {"device": current_platform.get_device_name(), "versions": versions()}
        # Lines of logs may have the user's home directory.
        text = json.dumps(record, indent=1).replace(str(Path.home()), "~")
        file.write_text(text + "\n", "utf-8")


def old_compiler() -> bool:
    """Whether PyTorch is older than 2.13, see `cases_of`: 2.11 failed on an H200."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) < (2, 13)


def fp8_cache() -> bool:
    """Whether this machine's device has float8 keys and values."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM's CPU attention reads float8 caches only with these instructions.
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_supported()
    return bool(current_platform.supports_fp8())


def jobs(platform: str) -> int:
    """How many cases run at a time: each needs a core, on a GPU two, and some memory."""
    import torch

    cores = len(os.sched_getaffinity(0))
    if platform == "cpu":
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // HOST_BYTES
    else:
        cores, room = cores // 2, torch.cuda.mem_get_info()[0] // GPU_BYTES
    return max(1, min(cores, room, MOST_JOBS))


def examine(case: Case) -> dict[str, Any]:
    """Run a case and judge it; return its entry in the report."""
    begin, golden = time.monotonic(), load(case.family)
    job = {
        "case": asdict(case),
        "model": str(CHECKPOINTS / FAMILIES[case.family]),
        "requests": golden["requests"],
        "problems": golden["problems"],
    }
    found: dict[str, Any] = {"case": asdict(case) | {"name": case.name}, "result": "FAILED"}
    try:
        answer = run_job(job)
    except ChildError as error:
        found |= {"summary": str(error), "log": error.log}
    else:
        verdict = judge(case, golden, answer)
        found |= {"summary": str(verdict), "chosen": answer["chosen"], "differ": verdict.differ}
        if not verdict.faults:
            found["result"] = "passed"
    return found | {"seconds": round(time.monotonic() - begin, 1)}


def run_job(job: Mapping[str, Any], seconds: float = CASE_SECONDS) -> dict[str, Any]:
    """Run a job of `child` in a separate process; raises `ChildError` if it has no answer."""
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-selftest-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        files = [str(folder / file) for file in ("job.json", "answer.json")]
        with (folder / "log").open("w") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "vllm_dllm.selftest.child", *files],
                stdout=log,
                stderr=log,
                env=os.environ | {"NO_COLOR": "1"},
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # with the processes that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if status == 0:
            answer: dict[str, Any] = json.loads((folder / "answer.json").read_text("utf-8"))
            return answer
        lines = (folder / "log").read_text("utf-8", errors="replace").splitlines()
    if status is None:
        reason = f"stopped after {seconds:.0f} seconds"
    elif status < 0:
        reason = f"killed by {signal.Signals(-status).name}"
    else:
        errors = [line.strip() for line in lines if "Error" in line.split(":")[0]]
        reason = f"exit status {status}: {errors[-1][:300] if errors else ''}"
    raise ChildError(reason, lines[-LOG_LINES:])


def versions() -> dict[str, str]:
    """The versions of this package, of Python, and of the installed dependencies."""
    found = {"vllm-dllm": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
