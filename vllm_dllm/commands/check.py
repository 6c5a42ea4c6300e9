"""``vllm-dllm check`` and ``vllm-dllm doctor``: whether it can serve, and what it is."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_dllm import __version__
from vllm_dllm.commands import environment
from vllm_dllm.commands.asking import Answer, ask
from vllm_dllm.vllm_patches import versions


def run() -> int:
    """Print what is installed.

    Returns:
        The exit status: 1, with the reason on stderr, if ``vllm serve`` would fail.
    """
    print(f"vllm-dllm      {__version__}")
    version = versions.vllm_version() or "not installed"
    print(f"vllm           {version} (supported: {versions.supported_versions()})")
    problem = environment.known_problem()
    if problem is None:
        answer = ask("check", {})
        for name, value in (answer.content or {"lines": {}})["lines"].items():
            print(f"{name:13}  {value}")
        problem = problem_of(answer)
    if problem is not None:
        print(f"cannot serve: {problem}", file=sys.stderr)
        return 1
    print("ready: vllm serve MODEL")
    return 0


def problem_of(answer: Answer) -> str | None:
    """Why nothing can be served, in a sentence; None if something can be."""
    if answer.problem:
        return f"{answer.problem}{_remedy(answer.problem)}"
    problem: str | None = answer.content["problem"]
    return problem


def _remedy(problem: str) -> str:
    """What to do about a problem that is known by its words; empty for others."""
    torch = environment.distributions().get("torch", "")
    foreign = ("torchvision::nms", "torchaudio", "torchcodec")
    if "+cpu" in torch and any(word in problem for word in foreign):
        return (
            f". torch {torch} stands beside torchvision, torchaudio or torchcodec for another "
            f"build of torch; {environment.CPU_INSTALL}"
        )
    return ""


def facts() -> dict[str, Any]:
    """Everything that a report of a fault needs."""
    problem = environment.known_problem()
    answer = None if problem else ask("check", {})
    lines = answer.content["lines"] if answer is not None and answer.content else {}
    return {
        "vllm-dllm": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory() / 2**30, 1),
        "gpus": _gpus(),
        "distributions": environment.distributions(),
        "variables": environment.variables(),
        "plugins": sorted(
            f"{point.name} = {point.value}"
            for group in ("vllm.general_plugins", "vllm_dllm.families", "vllm_dllm.algorithms")
            for point in metadata.entry_points(group=group)
        ),
        "answers": lines,
        "problem": problem or (problem_of(answer) if answer is not None else None),
        "log": answer.log if answer is not None and answer.problem else "",
    }


def doctor(as_json: bool) -> int:
    """Print `facts`; returns the exit status, 1 if nothing can be served."""
    found = facts()
    if as_json:
        print(json.dumps(found, indent=1))
        return 1 if found["problem"] else 0
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            print("".join(f"  {key:20} {each}\n" for key, each in value.items()), end="")
        elif isinstance(value, list):
            print(f"{name}: {'; '.join(value) or 'none'}")
        elif name == "log" and value:
            print("log:\n  " + value.replace("\n", "\n  "))
        elif name != "log":
            print(f"{name}: {value}")
    return 1 if found["problem"] else 0


def _processor() -> str:
    place = Path("/proc/cpuinfo")
    lines = place.read_text("utf-8").splitlines() if place.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> list[str]:
    """The NVIDIA GPUs that the driver names."""
    return [
        line.split(":", 1)[1].strip()
        for place in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in place.read_text("utf-8").splitlines()
        if line.startswith("Model")
    ]
