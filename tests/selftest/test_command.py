"""The command itself: children that crash, hang or leave processes behind, and the report."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.selftest_running import cases, run
from vllm_dllm.attention import served_route
from vllm_dllm.attention.routes import Device
from vllm_dllm.selftest import command
from vllm_dllm.selftest.cases import absent, cases_of
from vllm_dllm.selftest.command import ChildError, run_job

SM90 = Device("cuda", (9, 0), True, frozenset({2, 3, 4}))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that nobody has; the names of the cases that were started on it."""
    started: list[str] = []

    def fail(job: dict[str, Any]) -> Any:
        started.append(command.Case(**job["case"]).name)
        raise ChildError("no such machine", ["last words"])

    monkeypatch.setattr(served_route, "device_here", lambda: SM90)
    monkeypatch.setattr(command, "fp8_cache", lambda: False)
    monkeypatch.setattr(command, "run_job", fail)
    return started


def test_listing_runs_nothing(hopper: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0 and hopper == []
    lines = capsys.readouterr().out.splitlines()
    assert set(lines) >= {case.name for case in cases_of(SM90)}
    assert lines[lines.index("not here:") + 1 :] == [f"{what}: {why}" for what, why in absent(SM90)]


def test_a_machine_on_which_nothing_works(
    hopper: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every case has a line of its own, and no case stops another."""
    report = tmp_path / "report.json"
    assert run("--jobs", "4", "--json", report) == 1
    names = sorted(case.name for case in cases_of(SM90))
    assert sorted(hopper) == names
    assert f"0 passed, {len(names)} FAILED" in capsys.readouterr().out
    found = cases(report)
    assert sorted(found) == names
    assert {(c["result"], c["summary"], *c["log"]) for c in found.values()} == {
        ("FAILED", "no such machine", "last words")
    }
    assert json.loads(report.read_text())["machine"]["flash_versions"] == [2, 3, 4]
    assert run("--jobs", "1", "--only", "no such case") == 1


def test_a_run_that_is_cut_off_leaves_its_report(
    hopper: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a lease of a GPU that ended before the report was written."""
    fail, report = command.run_job, tmp_path / "report.json"

    def end_at_the_second(job: dict[str, Any]) -> Any:
        if not hopper:
            return fail(job)
        limit = time.monotonic() + 10
        while not report.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_job", end_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run("--jobs", "1", "--json", report)
    assert list(cases(report)) == hopper


@pytest.mark.parametrize(
    ("platform", "cores", "memory", "number"),
    [
        ("cpu", 2, 64, 2),
        ("cpu", 8, 13, 2),
        ("cuda", 16, 10, 3),
        ("cuda", 1, 1, 1),
    ],
)
def test_cases_at_a_time(
    monkeypatch: pytest.MonkeyPatch, platform: str, cores: int, memory: int, number: int
) -> None:
    free = memory << 30
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": free >> 12, "SC_PAGE_SIZE": 4096}.get)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free, free))
    assert command.jobs(platform) == number


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", 60, "killed by SIGSEGV"),
        ("time.sleep(60)", 1, "stopped after 1 seconds"),
        ("raise ValueError('bad')", 60, "exit status 1: ValueError: bad"),
        ("raise SystemExit(3)", 60, "exit status 3: "),
    ],
)
def test_how_a_case_ended_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, seconds: float, reason: str
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import os, signal, subprocess, sys, time\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"print(started.pid, flush=True)\n{code}\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(python))
    with pytest.raises(ChildError) as caught:
        run_job({}, seconds)
    assert str(caught.value) == reason
    grandchild = int(caught.value.log[0])
    for _ in range(100):
        state = Path(f"/proc/{grandchild}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(grandchild, 9)
        pytest.fail("it is still there")
