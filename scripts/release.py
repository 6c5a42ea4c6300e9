"""Build what a release publishes, and try it as somebody who has only the README.

    .venv/bin/python scripts/release.py [--dist DIR] [--no-install]

1. Builds the sdist, the wheel from the sdist, and the wheels of the distributions beside it.
2. Checks their metadata and contents.
3. Makes a fresh environment, installs with the README's own command for a CPU, runs its next
   commands (``check`` and ``demo``), and reads the first answer.

Nothing is published. Stops with status 1 and the reason at the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What is built beside this package.
BESIDE = (
    *(ROOT / "packages" / name for name in ("canvas-grammar", "vllm-cpu-v2")),
    ROOT / "packaging" / "vllm-cpu-metadata",
)
WHEEL_LIMIT = 10 << 20  # bytes; more is inconvenient for those who install it on many machines
IN_THE_WHEEL = (
    *("vllm_dllm/py.typed", "vllm_dllm/selftest/golden/tiny-llada2.json"),
    *("vllm_dllm/selftest/checkpoints/tiny-sdar/model.safetensors",),
)
IN_THE_SDIST = (
    *("README.md", "LICENSE", "Makefile", "docs/structure.md"),
    *("examples/offline.py", "tests/conftest.py", "packaging/cpu.txt"),
    *("packages/canvas-grammar/canvas_grammar/py.typed",),
)
FIELDS = ("Author", "Classifier", "Summary", "License-Expression", "Project-URL", "Keywords")


class ReleaseError(Exception):
    """Why this cannot be released."""


def build(dist: Path) -> tuple[Path, Path]:
    """Build into a folder; returns the sdist and the wheel of this package."""
    dist.mkdir(parents=True, exist_ok=True)
    for old in [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]:
        old.unlink()
    call("-m", "build", "--outdir", dist, ROOT)
    call("-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", dist, *BESIDE)
    call("-m", "twine", "check", "--strict", *dist.glob("*.whl"), *dist.glob("*.tar.gz"))
    return one(dist, "vllm_dllm-*.tar.gz"), one(dist, "vllm_dllm-*.whl")


def check_contents(sdist: Path, wheel: Path) -> None:
    """Raises `ReleaseError` for what is missing, or does not belong there."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expect(set(IN_THE_SDIST) - names, f"{sdist.name} lacks")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        fields = HeaderParser().parsestr(
            archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        )
    expect(set(IN_THE_WHEEL) - names, f"{wheel.name} lacks")
    strange = {name for name in names if not name.startswith(("vllm_dllm/", "vllm_dllm-"))}
    expect(strange, f"{wheel.name} also has")
    expect({field for field in FIELDS if not fields.get(field)}, f"{wheel.name} does not state")
    if wheel.stat().st_size > WHEEL_LIMIT:
        raise ReleaseError(f"{wheel.name} has {wheel.stat().st_size} bytes, over {WHEEL_LIMIT}")


def readme_commands() -> list[str]:
    """The commands of the README for a machine without a GPU, in their order."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"Without a GPU.*?\n\n((?:    [^\n]+\n)+)", text, re.DOTALL)
    if found is None:
        raise ReleaseError("README.md has no commands for a machine without a GPU")
    return [line.strip() for line in found[1].splitlines()]


def install_and_ask(dist: Path, folder: Path) -> str:
    """Follow the README in a fresh environment; returns what its commands printed.

    The file that the README names on the web is read from this checkout, and what it looks for on
    the release page is looked for in `dist`, too.
    """
    call("-m", "venv", folder / "env")
    listed = (ROOT / "packaging" / "cpu.txt").read_text("utf-8")
    (folder / "cpu.txt").write_text(re.sub(r"(--find-links) .*", rf"\1 {dist}", listed))
    binaries = folder / "env" / "bin"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
    environment["VLLM_CACHE_ROOT"] = str(folder / "cache")
    # An index that cannot be reached from here would else delay each of 150 packages.
    environment["PIP_RETRIES"] = "0"
    said = []
    for command in readme_commands():
        command = re.sub(r"https://\S+/cpu\.txt", str(folder / "cpu.txt"), command)
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said.append(done.stdout)
        print("\n".join(done.stdout.splitlines()[-25:]), flush=True)
        if done.returncode:
            raise ReleaseError(f"{command!r} ended with status {done.returncode}")
    return "\n".join(said)


def call(*command: object) -> None:
    """Run Python with these arguments; raises `ReleaseError` with its output if it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")


def one(dist: Path, pattern: str) -> Path:
    """The only file of a pattern."""
    (found,) = dist.glob(pattern)
    return found


def expect(wrong: set[str], what: str) -> None:
    """Raises `ReleaseError` unless the set is empty."""
    if wrong:
        raise ReleaseError(f"{what} {', '.join(sorted(wrong)[:10])}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-install", action="store_true", help="build and check only")
    args = parser.parse_args(arguments)
    try:
        sdist, wheel = build(args.dist.resolve())
        check_contents(sdist, wheel)
        print(f"built: {sdist.name}, {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)")
        if not args.no_install:
            with tempfile.TemporaryDirectory(prefix="vllm-dllm-release-") as folder:
                said = install_and_ask(args.dist.resolve(), Path(folder))
            if "64 + 28\nassistant: 92" not in said:
                raise ReleaseError("the first question was not answered with 92")
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print("all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
