"""The installed vLLM has every name that this package relies on, with the recorded signature."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import ROOT
from tests.vllm_seams import broken, seams
from tests.vllm_seams.signatures import RECORD, installed, of_release, recorded, signature_of
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
    """And every seam has a name and tests, and says which releases it was tried with."""
    page, record = seams.PAGE.read_text("utf-8"), recorded_now()
    names = [name for group in set(record) - {"releases"} for name in record[group]]
    found, without = seams.by_seam(page, names)
    assert without == []
    assert [seam.names for seam, of_seam in found.items() if not of_seam] == []
    assert [seam.names[0] for seam in found] == [*seams.SHOWN_BY]
    paths = {path for seam in found for path in seam.tests}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert seams.with_releases(page, record) == page, (
        "write it anew: .venv/bin/python -m tests.vllm_seams.signatures"
    )


def test_a_record_keeps_what_other_releases_have() -> None:
    alike, differs, gone, new = ({"same": "()"}, {"differs": "(a)"}, {"gone": "()"}, {"new": "()"})
    record = recorded({"releases": []}, "0.9", {"used": alike | differs | gone})
    record = recorded(record, "0.10", {"used": alike | {"differs": "(b)"} | new})
    assert record == {
        "releases": ["0.9", "0.10"],
        "used": {
            "differs": {"0.9": "(a)", "0.10": "(b)"},
            "gone": {"0.9": "()"},
            "new": {"0.10": "()"},
            "same": "()",
        },
    }
    assert of_release(record, "0.9") == {"used": alike | differs | gone}


@pytest.mark.parametrize(
    ("called", "found"),
    [
        ("pathlib:Path.exists", "(self"),
        ("pathlib:Path.gone", "missing"),
        ("pathlib:Gone.exists", "missing"),
        ("gone_altogether:Path.exists", "missing"),
        ("tests.vllm_seams.seams:Seam.line", "field"),
        ("argparse:ArgumentParser.epilog", "attribute"),
    ],
)
def test_a_signature_needs_no_engine(called: str, found: str) -> None:
    assert signature_of(called).startswith(found)


def test_what_broke_is_named_by_its_seam(tmp_path: Path) -> None:
    """Changed and missing names, failed tests by file and folder, and a file that does not load."""
    page = seams.PAGE.read_text("utf-8")
    report = tmp_path / "junit.xml"
    metrics, other = "tests.serving.servers.test_metrics", "tests.settings.test_parsing"
    report.write_text(
        "<testsuites><testsuite>"
        f'<testcase classname="{metrics}" name="test_a[x]"><failure/></testcase>'
        f'<testcase classname="{metrics}" name="test_passes"/>'
        f'<testcase classname="" name="tests.attention.test_routes"><error/></testcase>'
        f'<testcase classname="{other}" name="test_b"><failure/></testcase>'
        "</testsuite></testsuites>"
    )
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler.make_stats"
    lines = broken.by_seam(page, {scheduler: ("(self)", "missing")}, broken.failures(report))
    text = "\n".join(lines)
    assert f"vllm.v1.core.sched\n  {scheduler}: missing, was (self)" in text
    assert "StatLoggerManager.__init__\n  tests/serving/servers/test_metrics.py::test_a[x]" in text
    assert "vllm.v1.attention\n  tests/attention/test_routes.py" in text
    assert lines[-2:] == ["of no seam", "  tests/settings/test_parsing.py::test_b"]
    assert "test_passes" not in text
