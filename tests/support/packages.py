"""Packages of other people (tests/packages), installed as pip installs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def pip_install(package: Path, files: tuple[str, ...], temporary: pytest.TempPathFactory) -> Path:
    """Install a package into a folder of its own, and return that folder.

    Args:
        package: the package's folder.
        files: its files; pip builds in a copy of them, because it writes into the source folder.
        temporary: makes the folders.
    """
    target, source = temporary.mktemp("installed"), temporary.mktemp("source")
    for file in files:
        (source / file).write_text((package / file).read_text())
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    done = subprocess.run(
        [*pip, "--target", str(target), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target
