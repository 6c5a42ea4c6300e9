"""What can be checked of examples/cluster without Ray: their form, and their page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT

EXAMPLES = sorted((ROOT / "examples" / "cluster").glob("ray_*.py"))
PAGE = (ROOT / "docs" / "deployment.md").read_text("utf-8")
MOST_LINES = 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_has_its_command(path: Path) -> None:
    text = path.read_text("utf-8")
    command = f".venv-ray/bin/python examples/cluster/{path.name}"
    assert len(text.splitlines()) <= MOST_LINES
    assert command in (ast.get_docstring(ast.parse(text)) or "") and command in PAGE


def test_the_documented_version_is_the_installed_one() -> None:
    requirement = (ROOT / "tests" / "cluster" / "requirements.txt").read_text().splitlines()[-1]
    assert f'"ray[data,serve]=={requirement.rpartition("==")[2]}"' in PAGE
