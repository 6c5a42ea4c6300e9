"""What counts as a change of something that we rely on, and how it is told."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.compat.planted import plant
from tests.support.checkpoints import ROOT
from vllm_dllm.cli import main
from vllm_dllm.compat import command, sources
from vllm_dllm.compat.comparison import ADDED, BODY, REMOVED, SIGNATURE, Change, compare
from vllm_dllm.compat.definitions import Definitions
from vllm_dllm.compat.fingerprints import read, relied_on, take, write
from vllm_dllm.compat.scan import Scan

OURS = """
from vllm.config import EngineConfig
from vllm.model import Model, work

class Ours(Model):
    def step(self, tokens):
        return work(super().step(tokens))

    def own(self):
        return 1

def size(config: EngineConfig) -> int:
    return config.double + config.size
"""
MODEL, ENGINE = "vllm/model.py", "vllm/config/engine.py"


def changes(folder: Path, *planted: tuple[str, str, str]) -> list[Change]:
    """The changes between the vLLM in small and one with these changes, for a package of ours."""
    ours = folder / "vllm_dllm"
    ours.mkdir()
    (ours / "a.py").write_text(OURS)
    before = Definitions(sources.in_folder(plant(folder / "before")))
    after = Definitions(sources.in_folder(plant(folder / "after", *planted)))
    scan = Scan(ours)
    return compare(take(relied_on(scan, before), before), scan, after)


@pytest.mark.parametrize(
    ("file", "old", "new", "kind", "what"),
    [
        (MODEL, "return tokens", "return tokens + 1", BODY, "vllm.model:Model.step"),
        (MODEL, "tokens: int)", "tokens: int, more: int = 0)", SIGNATURE, "vllm.model:Model.step"),
        (MODEL, "def step", "async def step", SIGNATURE, "vllm.model:Model.step"),
        (MODEL, "def step", "def steps", REMOVED, "vllm.model:Model.step"),
        (MODEL, "return x", "return x + 0", BODY, "vllm.model:work"),
        (MODEL, "kind = Kind.TEXT", "kind = None", BODY, "vllm.model:Model.kind"),
        (MODEL, "self.path = path", "self.path = None", BODY, "vllm.model:Root.load"),
        (ENGINE, "2 * self.size", "3 * self.size", BODY, "vllm.config.engine:EngineConfig.double"),
        (ENGINE, "size: int", "size: float", SIGNATURE, "vllm.config.engine:EngineConfig.size"),
        (ENGINE, "size: int = 1", "size: int = 2", BODY, "vllm.config.engine:EngineConfig.size"),
    ],
)  # fmt: skip
def test_a_change_is_found(
    tmp_path: Path, file: str, old: str, new: str, kind: str, what: str
) -> None:
    assert [(c.kind, c.what) for c in changes(tmp_path, (file, old, new))] == [(kind, what)]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (ENGINE, '"""Twice the size."""', '"""Two times the size."""'),
        (ENGINE, "  # as promised", ""),
        (ENGINE, "2 * self.size", "(2 *\n            self.size)"),
        (MODEL, "class Kind", "\n\nunused = 1\n\n\nclass Kind"),
        (ENGINE, "def current()", "def other() -> int:\n    return 1\n\n\ndef current()"),
    ],
)
def test_what_changes_nothing_for_us(tmp_path: Path, file: str, old: str, new: str) -> None:
    assert changes(tmp_path, (file, old, new)) == []


def test_a_definition_that_moved_behind_its_name_is_no_change(tmp_path: Path) -> None:
    moved = (
        "def work(x):\n        return x\n",
        "from vllm.work import work\n",
    )
    plant(tmp_path / "after")
    (tmp_path / "after/vllm/work.py").write_text("def work(x):\n    return x\n")
    assert changes(tmp_path, (MODEL, *moved)) == []


def test_what_is_gone_is_looked_for_elsewhere(tmp_path: Path) -> None:
    plant(tmp_path / "after")
    (tmp_path / "after/vllm/work.py").write_text("def work(x):\n    return x\n")
    gone = "from fast import work\nexcept ImportError:\n\n    def work"
    planted = (MODEL, gone, "pass\nfinally:\n\n    def play")
    (change,) = changes(tmp_path, planted)
    assert (change.kind, change.what, change.elsewhere) == (
        REMOVED,
        "vllm.model:work",
        ("vllm.work",),
    )
    assert [(use.file, use.line, use.how) for use in change.uses] == [
        ("vllm_dllm/a.py", 3, "imported")
    ]


def test_a_name_of_ours_that_vllm_takes(tmp_path: Path) -> None:
    planted = (MODEL, "    def step", "    def own(self):\n        return 2\n\n    def step")
    (change,) = changes(tmp_path, planted)
    assert (change.kind, change.what) == (ADDED, "vllm.model:Model.own")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    vllm = Definitions(sources.in_folder(plant(tmp_path)))
    things = take(["vllm.model:Model", "vllm:config", "vllm.model:gone", "vllm.config"], vllm)
    assert len(things) == 2
    write(things, "1.2.0", tmp_path / "record.json")
    assert read(tmp_path / "record.json") == ("1.2.0", things)


def test_folder_wheel_and_package_folder_are_alike(tmp_path: Path) -> None:
    folder = plant(tmp_path / "tree")
    wheel = tmp_path / "vllm-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder))
    for target in (folder, folder / "vllm", wheel):
        source = sources.of_target(str(target), download=False)
        assert source.version == "1.2.0"
        assert source.text("vllm.config") == (folder / "vllm/config/__init__.py").read_text()


def test_targets_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("no zip")
    for target, complaint in (
        (tmp_path, "has no folder `vllm`"),
        (tmp_path / "x.whl", "is no wheel"),
        ("0.99.1", "pip download --no-deps vllm==0.99.1"),
        ("nothing", "no folder, no wheel and no version"),
    ):
        with pytest.raises(sources.TargetError, match=complaint):
            sources.of_target(str(target), download=False)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that then says what it has imported."""
    code = (
        "import sys; from vllm_dllm.cli import main; status = main(sys.argv[1:]); "
        "print({'torch', 'vllm'} & set(sys.modules), file=sys.stderr); sys.exit(status)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "compat-report", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_installed_vllm_has_changed_nothing() -> None:
    done = run()
    assert done.returncode == 0, done.stdout
    assert done.stderr == "set()\n"
    assert "none has changed" in done.stdout


def test_a_version_that_is_not_here() -> None:
    done = run("0.99.1")
    assert done.returncode == 2
    assert "pip download --no-deps vllm==0.99.1" in done.stderr


def test_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a package of ours, and a vLLM that has three changes."""
    ours = tmp_path / "vllm_dllm"
    ours.mkdir()
    (ours / "a.py").write_text(OURS)
    monkeypatch.setattr(command, "PACKAGE", ours)
    monkeypatch.setattr(command, "RECORD", tmp_path / "record.json")
    tested = plant(tmp_path / "tested")
    later = plant(
        tmp_path / "later",
        (MODEL, "tokens: int)", "tokens: int, more: int = 0)"),
        (MODEL, "return x", "return x + 0"),
        (ENGINE, "def double", "def twice"),
    )
    assert main(["compat-report", str(tested), "--record"]) == 0
    assert main(["compat-report", str(tested)]) == 0
    capsys.readouterr()
    assert main(["compat-report", str(later)]) == 1
    assert capsys.readouterr().out == EXPECTED.format(later=later)
    assert main(["compat-report", str(later), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["version"], printed["tested"]) == ("1.2.0", "1.2.0")
    assert [change["kind"] for change in printed["changes"]] == [REMOVED, SIGNATURE, BODY]
    assert printed["changes"][0]["uses"] == [{"file": "vllm_dllm/a.py", "line": 13, "how": "used"}]


EXPECTED = """\
removed (1)
  vllm.config.engine:EngineConfig.double    [vllm_dllm/a.py:13 used]

signature changed (1)
  vllm.model:Model.step    [vllm_dllm/a.py:6 overridden; vllm_dllm/a.py:7 used]
    + more: int=0

body changed (1)
  vllm.model:work    [vllm_dllm/a.py:3 imported]

vLLM 1.2.0 ({later}), compared with 1.2.0, which is tested: of 9 functions, classes, \
attributes and modules that we rely on 1 removed, 1 signature changed, 1 body changed.
"""
