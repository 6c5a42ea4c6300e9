"""Packages of other people (tests/packages), installed as pip installs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import run


def pip_install(package: Path, files: tuple[str, ...], temporary: pytest.TempPathFactory) -> Path:
    """Install these files of a package into a folder of its own, and return that folder.

    pip builds in a copy of them, because it writes into the source folder.
    """
    target, source = temporary.mktemp("installed"), temporary.mktemp("source")
    for file in files:
        (source / file).write_text((package / file).read_text())
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    done = run(*pip, "--target", target, source)
    assert done.returncode == 0, done.stderr
    return target
