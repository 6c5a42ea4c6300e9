"""``vllm-dllm check`` and ``doctor``: what they say, what they take, and that vLLM agrees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.commands.running import command, seconds_of_children
from vllm_dllm.vllm_patches import versions

SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))
ROOT = Path(__file__).resolve().parents[2]


def check(before: str = "", after: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("check", before=before, after=after),
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_working_installation(kept_answers: Path) -> None:
    """The second time it takes at most two seconds, because it imports neither torch nor vLLM."""
    first = check()
    assert first.returncode == 0, first.stderr
    for line in ("vllm-dllm ", "vllm ", "platform ", "bridged ", "architectures  LLaDA2MoeModelLM"):
        assert line in first.stdout
    assert first.stdout.endswith("ready: vllm serve MODEL\n")
    assert first.stderr == ""
    assert len(list(kept_answers.iterdir())) == 1
    begin = seconds_of_children()
    again = check(after="print({'torch', 'vllm', 'transformers'} & set(sys.modules))")
    assert seconds_of_children() - begin < 2
    assert again.stdout == first.stdout + "set()\n"


@pytest.mark.long
def test_an_answer_is_kept_as_long_as_its_environment(kept_answers: Path) -> None:
    """Another variable that vLLM reads is another environment; one that it does not read is not."""
    check()
    before = set(kept_answers.iterdir())
    check(SOMETHING_ELSE="1")
    assert set(kept_answers.iterdir()) == before
    check(VLLM_NO_USAGE_STATS="1")
    assert len(set(kept_answers.iterdir()) - before) == 1


def test_plugin_switched_off() -> None:
    done = check(VLLM_PLUGINS="")
    assert done.returncode == 1
    assert "VLLM_PLUGINS=''" in done.stderr


def test_unsupported_vllm() -> None:
    done = check("import vllm_dllm.vllm_patches.versions as v; v.vllm_version = lambda: '0.99.0'")
    assert done.returncode == 1
    assert "vLLM 0.99.0 is not supported (it has not been tested; needs >=" in done.stderr


def test_a_plugin_that_cannot_register(tmp_path: Path, kept_answers: Path) -> None:
    """And a failure is not kept."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys
class Fail:
    def find_spec(self, name, path, target=None):
        if name == "vllm_dllm.vllm_patches.registration":
            raise RuntimeError("boom")
sys.meta_path.insert(0, Fail())
"""
    )
    before = set(kept_answers.iterdir())
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = check(PYTHONPATH=path)
    assert done.returncode == 1
    assert "cannot serve: boom" in done.stderr
    assert set(kept_answers.iterdir()) == before


def environment(place: Path, *without: str) -> Path:
    """The Python of an environment like this one, but for some entries of site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    for entry in SITE.iterdir():
        if not any(entry.match(pattern) for pattern in without):
            (site / entry.name).symlink_to(entry)
    return place / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "said"),
    [
        pytest.param((), "ready: ", id="nothing is missing", marks=pytest.mark.long),
        pytest.param(("vllm-*.dist-info",), "asks for a distribution vllm", id="no metadata"),
        pytest.param(("vllm_dllm_cpu.pth",), "pip install -r cpu.txt", id="no start-up hook"),
        pytest.param(
            *(("msgspec",), "No module named 'msgspec'"),
            id="a dependency of vLLM's",
            marks=pytest.mark.long,
        ),
    ],
)
def test_it_is_ready_exactly_where_vllm_starts(
    tmp_path: Path, without: tuple[str, ...], said: str
) -> None:
    """`check` called an installation ready in which the command ``vllm`` died on its imports."""
    python = environment(tmp_path / "env", *without)
    checked = [str(python), *command("check")[1:]]
    starts = "import sys; sys.argv = ['vllm', 'serve', '--help']\n"
    starts += "from vllm.entrypoints.cli.main import main; main()"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    vllm = subprocess.run([str(python), "-c", starts], env=env, capture_output=True, check=False)
    done = subprocess.run(checked, env=env, capture_output=True, text=True, check=False)
    if without == ("vllm_dllm_cpu.pth",) and vllm.returncode == 0:
        said = "ready: "  # torchvision fits this torch, so that nothing needs the hook
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == (vllm.returncode == 0)


def test_doctor() -> None:
    """Everything about this machine, no secret, and the same status as `check`."""
    env = os.environ | {"VLLM_API_KEY": "hunter2", "VLLM_LOGGING_LEVEL": "ERROR"}
    run = [*command("doctor", "--json")]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["problem"] is None
    assert found["distributions"]["torch"] and found["distributions"]["vllm-dllm"]
    assert found["variables"]["VLLM_API_KEY"] == "(set)" and "hunter2" not in done.stdout
    assert found["answers"]["platform"] and found["memory_gib"] > 0
    assert "dllm = vllm_dllm.plugin:register" in found["plugins"]
    plain = subprocess.run(
        command("doctor"), env=env | {"VLLM_PLUGINS": ""}, capture_output=True, text=True
    )
    assert plain.returncode == 1
    assert "problem: VLLM_PLUGINS='' keeps vLLM" in plain.stdout


def test_pip_takes_the_versions_that_are_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [r for r in map(Requirement, project["dependencies"]) if r.name == "vllm"]
    assert [r.specifier for r in wanted] == [SpecifierSet(versions.supported_versions())]


def test_version_bounds(monkeypatch) -> None:
    for version, fine in (
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.1.dev2+g1", True),
        ("0.31.9", False),
        ("0.33.0", False),
        ("1.0", False),
        ("weird", False),
        (None, False),
    ):
        monkeypatch.setattr(versions, "vllm_version", lambda version=version: version)
        assert (versions.version_problem() is None) == fine, version
