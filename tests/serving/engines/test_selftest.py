"""The command itself: real engines, files that were tampered with, and an installed wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT, TINY
from tests.support.selftest_running import CASE, cases, run, selftest
from vllm_dllm.selftest import command
from vllm_dllm.selftest.cases import FAMILIES
from vllm_dllm.selftest.golden import load


@pytest.mark.engine
@pytest.mark.slow
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


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)  # three to four minutes with two cores of its own
def test_every_case_of_this_machine_passes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = selftest("--json", report)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {case["result"] for case in cases(report).values()} == {"passed"}


# ---- An installed wheel has all that the command needs

SOURCES = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE")
MOST_BYTES = 10e6


def run_python(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as pip installs it; pip builds in a copy of the source."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    without = shutil.ignore_patterns("__pycache__")
    # As git has it: the link to the checkpoints stays a link.
    shutil.copytree(ROOT / "vllm_dllm", source / "vllm_dllm", symlinks=True, ignore=without)
    shutil.copytree(TINY, source / "examples" / "tiny" / "checkpoints")
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run_python(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source)
    (wheel,) = wheels.iterdir()
    assert wheel.stat().st_size < MOST_BYTES
    target = tmp_path_factory.mktemp("installed")
    run_python(*pip, "install", "--no-deps", "--target", target, wheel)
    return target


def test_checkpoints_and_golden_answers_are_in_the_wheel(installed: Path) -> None:
    room = installed / "vllm_dllm" / "selftest"
    assert not (room / "checkpoints").is_symlink()
    for name in FAMILIES.values():
        assert (room / "golden" / f"{name}.json").is_file()
        for file in (TINY / name).iterdir():
            assert (room / "checkpoints" / name / file.name).read_bytes() == file.read_bytes()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.long
def test_a_case_passes_from_there(installed: Path, tmp_path: Path) -> None:
    report, there = tmp_path / "report.json", {"PYTHONPATH": str(installed)}
    show = "import vllm_dllm; print(vllm_dllm.__file__)"
    place = run_python("-c", show, cwd=tmp_path, env=os.environ | there)
    assert Path(place.strip()).is_relative_to(installed)
    done = selftest("--only", f"llada2/{CASE}", "--json", report, cwd=tmp_path, **there)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "1 passed, 0 FAILED" in done.stdout
    ((name, case),) = cases(report).items()
    assert (name, case["result"], case["differ"]) == (f"llada2/{CASE}", "passed", [])
    assert case["chosen"]["backend"] == "CPU_ATTN" and case["chosen"]["scheduling"] == "sync"
    content = json.loads(report.read_text())
    assert content["machine"]["platform"] == "cpu" and "vllm" in content["versions"]
