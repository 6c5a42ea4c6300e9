"""Every benchmark that the documentation names runs, in a short form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT
from tests.support.documents.commands import pages
from tests.support.documents.running import copied, shell
from tests.support.documents.table import BENCHMARK, BENCHMARKS

NAMED = sorted({name for page in pages() for name in BENCHMARK.findall((ROOT / page).read_text())})


def test_every_benchmark_that_is_named_has_a_short_form() -> None:
    assert sorted(BENCHMARKS) == NAMED, "say in tests/support/documents/table.py how it is run"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMED)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = BENCHMARKS[name].replace("OUT", str(out))
    interpreted = "TRITON_INTERPRET=1 " if "--quick" in options else ""
    done = shell(f"{interpreted}python {name} {options}", copied(tmp_path), timeout=1500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if "OUT" in BENCHMARKS[name]:
        assert json.loads(out.read_text())["results"]
