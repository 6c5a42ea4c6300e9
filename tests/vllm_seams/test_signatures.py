"""The installed vLLM has every name that this package relies on, with the recorded signature."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_seams import seams
from tests.vllm_seams.signatures import RECORD, installed, of_release
from vllm_dllm.vllm_seams import versions


@pytest.mark.engine
@pytest.mark.slow
def test_signatures(tmp_path: Path) -> None:
    """Look at what changed and why, then record it: see the docstring of `signatures`."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.vllm_seams.signatures", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "missing: []", "imports, also inside functions"
    assert json.loads(found.read_text()) == of_release(recorded_now(), installed()), (
        "record it anew: .venv/bin/python -m tests.vllm_seams.signatures"
    )


def recorded_now() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def test_every_supported_release_is_recorded() -> None:
    assert recorded_now()["releases"] == [*versions.how_tested()]


def test_the_page_has_every_wrap() -> None:
    """And nothing else, so that `docs/seams.md` says what of vLLM the package touches."""
    wrapped = [name.partition(":")[2] for name in recorded_now()["wrapped"]]
    page = seams.PAGE.read_text("utf-8")
    table = page.partition("\n## Wrapped\n")[2].partition("\n## ")[0]
    named = [name for seam in seams.seams(table) for name in seam.names]
    assert sorted(named) == sorted(wrapped)
    assert f"wraps {len(wrapped)} functions" in page


def test_every_name_belongs_to_a_seam_of_the_page() -> None:
    """And every seam has a name, and says which releases it was tried with."""
    page, record = seams.PAGE.read_text("utf-8"), recorded_now()
    names = [name for group in set(record) - {"releases"} for name in record[group]]
    found, without = seams.by_seam(page, names)
    assert without == []
    assert [seam.names for seam, of_seam in found.items() if not of_seam] == []
    assert seams.with_releases(page, record) == page, (
        "write it anew: .venv/bin/python -m tests.vllm_seams.signatures"
    )
