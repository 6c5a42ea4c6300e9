"""``vllm-dllm check`` and ``vllm-dllm doctor``: report what is installed and whether it works."""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_dllm import __version__
from vllm_dllm.commands import installation, show_config
from vllm_dllm.vllm_seams import versions

TINY = Path(__file__).resolve().parents[1] / "selftest" / "checkpoints"


def run() -> int:
    """Print what is installed.

    Returns:
        The exit status: 1, with the reason on stderr, if ``vllm serve`` would fail.
    """
    print(f"vllm-dllm      {__version__}")
    version = versions.vllm_version() or "not installed"
    print(f"vllm           {version} (supported: {versions.supported_versions()})")
    try:
        for name, value in found_by_trying().items():
            print(f"{name:13}  {value}")
    except Exception as error:
        print(f"cannot serve: {show_config.reason(error)}", file=sys.stderr)
        return 1
    print("ready: vllm serve MODEL")
    return 0


def found_by_trying() -> dict[str, str]:
    """Go as far as ``vllm serve`` goes before it loads weights, with a tiny model.

    Returns:
        Names and values for a person to read.

    Raises:
        Exception: nothing can be served; the message says why.
    """
    left_out = installation.load("ERROR")

    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    from vllm_dllm.families import registry

    if current_platform.is_unspecified():
        raise installation.NotUsableError("vLLM found no platform (no GPU, and not a CPU build)")
    if not HAS_TRITON and not current_platform.is_cpu():
        raise installation.NotUsableError(
            "Model Runner V2 needs Triton, which vLLM could not use here"
        )
    import vllm._custom_ops  # noqa: F401

    show_config.explain([str(TINY / "tiny-llada2"), "--enforce-eager"])
    lines = {
        "platform": f"{current_platform.device_type} ({current_platform.get_device_name()})",
        "bridged": _bridged(),
        "kernels": "torch, triton; attention CUSTOM"
        if HAS_TRITON
        else "torch (no Triton here: dllm.kernels=triton and attention CUSTOM are refused)",
        "architectures": ", ".join(registry.served_architectures()),
    }
    if left_out:
        lines["left out"] = "; ".join(left_out)
    return lines


def _bridged() -> str:
    """What vLLM's CPU build lacks here and ``vllm-cpu-v2`` adds, as text."""
    try:
        from vllm_cpu_v2.plugin import parts
    except ImportError:
        return "nothing (vllm-cpu-v2 is not installed; machines without a GPU need it)"
    return ", ".join(parts()) or "nothing"


def facts() -> dict[str, Any]:
    """Everything that a bug report needs."""
    answers: dict[str, str] = {}
    problem = log = None
    try:
        answers = found_by_trying()
    except Exception as error:
        problem, log = show_config.reason(error), traceback.format_exc()
    return {
        "vllm-dllm": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory() / 2**30, 1),
        "gpus": _gpus(),
        "distributions": installation.distributions(),
        "variables": installation.variables(),
        "plugins": sorted(
            f"{point.name} = {point.value} ({installation.distribution_of(point)})"
            for group in (installation.GROUP, "vllm_dllm.families", "vllm_dllm.algorithms")
            for point in metadata.entry_points(group=group)
        ),
        "answers": answers,
        "problem": problem,
        "log": log or "",
    }


def doctor(as_json: bool) -> int:
    """Print `facts`; return the exit status, which is 1 if nothing can be served."""
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
    """The NVIDIA GPUs that the driver lists."""
    return [
        line.split(":", 1)[1].strip()
        for place in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in place.read_text("utf-8").splitlines()
        if line.startswith("Model")
    ]
