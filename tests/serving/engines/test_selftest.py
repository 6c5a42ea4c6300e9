"""The command itself: real engines, answers and checkpoints that were tampered with, all cases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import TINY
from tests.support.selftest_running import CASE, cases, run, selftest
from vllm_dllm.selftest import command
from vllm_dllm.selftest.cases import FAMILIES
from vllm_dllm.selftest.golden import load

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.long
def test_a_wrong_token_and_a_crash_are_two_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One family has another golden answer, one no readable checkpoint; the third one passes."""
    checkpoints, report, golden = tmp_path / "checkpoints", tmp_path / "report.json", load("llada2")
    shutil.copytree(TINY, checkpoints)
    (checkpoints / FAMILIES["diffusion_gemma"] / "config.json").write_text("{")
    planted = golden["requests"][3]
    planted["tokens"]["symmetric"][0] ^= 1
    monkeypatch.setattr(command, "CHECKPOINTS", checkpoints)
    monkeypatch.setattr(command, "load", lambda name: golden if name == "llada2" else load(name))
    assert run("--only", CASE, "--json", report) == 1
    assert "FAILED" in capsys.readouterr().out
    found = cases(report)
    wrong, crashed = (found[f"{family}/{CASE}"] for family in ("llada2", "diffusion_gemma"))
    assert found[f"sdar/{CASE}/fused_commit-on"]["result"] == "passed"
    assert wrong["result"] == crashed["result"] == "FAILED"
    differ = f"1 of {len(golden['requests'])} requests differ: {planted['id']}"
    assert wrong["summary"].endswith(differ)
    assert {one["id"] for one in wrong["differ"]} == {planted["id"]}
    assert crashed["summary"].startswith("exit status 1: ")
    assert any("config.json" in line for line in crashed["log"])


@pytest.mark.long
@pytest.mark.timeout(1500)  # three to four minutes with two cores of its own
def test_every_case_of_this_machine_passes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = selftest("--json", report)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {case["result"] for case in cases(report).values()} == {"passed"}
