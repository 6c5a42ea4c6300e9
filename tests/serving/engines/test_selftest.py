"""The command itself: real engines, answers and checkpoints that were tampered with, all cases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import TINY
from tests.support.selftest_running import CASE, cases, selftest
from vllm_dllm.selftest.cases import FAMILIES
from vllm_dllm.selftest.golden import GOLDEN

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.long
def test_a_wrong_token_and_a_crash_are_two_failures(tmp_path: Path) -> None:
    """One family has another golden answer, one no readable checkpoint; the third one passes."""
    golden, checkpoints = tmp_path / "golden", tmp_path / "checkpoints"
    shutil.copytree(GOLDEN, golden)
    shutil.copytree(TINY, checkpoints)
    place = golden / f"{FAMILIES['llada2']}.json"
    content = json.loads(place.read_text())
    planted = content["requests"][3]
    planted["tokens"]["symmetric"][0] ^= 1
    place.write_text(json.dumps(content))
    (checkpoints / FAMILIES["diffusion_gemma"] / "config.json").write_text("{")
    report = tmp_path / "report.json"
    options = ("--golden", golden, "--checkpoints", checkpoints, "--json", report)
    done = selftest("--only", CASE, *options)
    assert done.returncode == 1
    assert "1 passed, 2 FAILED, 0 not run" in done.stdout
    wrong, crashed, fine = (cases(report)[f"{family}/{CASE}"] for family in FAMILIES)
    assert fine["result"] == "passed" and fine["name"].startswith("sdar/")
    assert wrong["reason"] == f"1 of {len(content['requests'])} requests differ: {planted['id']}"
    assert {one["id"] for one in wrong["verdict"]["differ"]} == {planted["id"]}
    assert crashed["reason"].startswith("exit status 1: ") and crashed["verdict"] is None
    assert any("config.json" in line for line in crashed["log"])
    for case in (wrong, crashed):
        assert any(
            line.split()[1] == "FAILED" and case["name"] in line
            for line in done.stdout.splitlines()
            if line.startswith("[")
        )


@pytest.mark.long
@pytest.mark.timeout(1500)  # three to four minutes with two cores of its own
def test_every_case_of_this_machine_passes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = selftest("--bench", "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    content = json.loads(report.read_text())
    assert {case["result"] for case in content["cases"]} == {"passed"}
    assert "diffusion_gemma, native, EAGER" in content["bench"]
    for system in content["bench"].values():
        assert all(0 < one["least_ms"] < one["ms"] for one in system["steps"].values())
