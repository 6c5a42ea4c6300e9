"""Lay the Python files of one vLLM over the compiled operators of another: lay_over.py WHEEL.

So a vLLM that has no CPU build can be tried on the CPU build before it. Run this with the Python of
an environment that has that build. It replaces every file of the package `vllm` but the compiled
ones, and prints which other packages have to be installed in another version, one to a line.
"""

from __future__ import annotations

import email
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

LIBRARY = ".so"
# What else of a wheel for CUDA is of no use on a CPU: a program, and sources of kernels.
FOR_CUDA = ("/vllm-rs", ".h", ".hpp", ".cuh", ".cu", ".inl")
# The compiled operators need the torch that they were compiled for.
KEPT = ("torch", "torchvision")


def lay_over(wheel: zipfile.ZipFile, site: Path) -> None:
    """Replace the files of the package in `site` by those of the wheel."""
    for path in (site / "vllm").rglob("*"):
        if path.is_file() and path.suffix != LIBRARY:
            path.unlink()
    for name in wheel.namelist():
        if name.startswith("vllm/") and not name.endswith((LIBRARY, *FOR_CUDA)):
            wheel.extract(name, site)


def unsatisfied(wheel: zipfile.ZipFile) -> list[str]:
    """The wheel's requirements of packages that are here in a version that it does not take.

    Those that are not here at all are needed for CUDA only.
    """
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_bytes(wheel.read(name))
    found = []
    for requirement in map(Requirement, fields.get_all("Requires-Dist", [])):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if requirement.name not in KEPT and version not in requirement.specifier:
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as given:
        lay_over(given, Path(sysconfig.get_path("purelib")))
        print("\n".join(unsatisfied(given)))
