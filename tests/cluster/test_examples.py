"""What of examples/cluster can be told without Ray: their form, and the figures of their page."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT

EXAMPLES = sorted((ROOT / "examples" / "cluster").glob("ray_*.py"))
PAGE = (ROOT / "docs" / "scaling.md").read_text("utf-8")
MOST_LINES = 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_has_its_command(path: Path) -> None:
    text = path.read_text("utf-8")
    command = f".venv-ray/bin/python examples/cluster/{path.name}"
    assert len(text.splitlines()) <= MOST_LINES
    assert command in (ast.get_docstring(ast.parse(text)) or "") and command in PAGE


def test_the_documented_run_is_the_measured_one() -> None:
    """With a row for each that came in, although an engine was killed while they ran."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "ray_data.json").read_text("utf-8"))
    found = measured["results"]
    assert found["rows_in"] == found["rows_out"] == 10_000
    assert found["lost"] == found["doubled"] == 0
    assert found["as_plain"] == found["rows_in"]
    assert found["nodes"] == 2
    assert f"{found['rows_before']:,} rows" in PAGE
    assert f"{found['as_plain']:,} of {found['rows_in']:,} answers" in PAGE
    assert f"{found['replaced_s']:.0f} s" in PAGE and f"{found['seconds']:.0f} s" in PAGE
    version = f"{found['ray']}\n"
    assert (ROOT / "tests" / "cluster" / "requirements.txt").read_text().endswith(f"=={version}")
