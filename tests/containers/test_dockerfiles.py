"""Dockerfiles say what README, pyproject.toml and setup say, and their images can be built."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.checkpoints import ROOT

DOCKERFILES = {name: ROOT / "containers" / f"{name}.Dockerfile" for name in ("cpu", "cuda")}
METADATA = "packaging/vllm-cpu-metadata"
# Built by hatchling, which is not installed here.
HATCHED = (METADATA, "packages/vllm-cpu-v2")
PINNED_TORCH = re.compile(r"torch==([\w.+]+)")
EACH = pytest.mark.parametrize("name", DOCKERFILES)


def said(name: str, instruction: str) -> list[str]:
    """The words of each such instruction, comments left out and continued lines joined."""
    lines = DOCKERFILES[name].read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [line.partition(" ")[2] for line in joined if line.startswith(f"{instruction} ")]


def copied(name: str) -> set[str]:
    copies = (rest.split() for rest in said(name, "COPY") if not rest.startswith("--from"))
    return {source for *sources, _ in copies for source in sources}


@pytest.mark.parametrize("path", [*DOCKERFILES.values(), ROOT / "examples/deploy/ray/Dockerfile"])
def test_hadolint_finds_nothing(path: Path) -> None:
    command = [str(Path(sys.executable).with_name("hadolint")), "--no-color", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


def test_versions_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / METADATA / "pyproject.toml").read_text("utf-8"))["project"]
    (cpu,) = (Requirement(line) for line in project["dependencies"] if "vllm-cpu" in line)
    (pinned,) = cpu.specifier
    assert f"v{pinned.version}" in DOCKERFILES["cuda"].read_text()
    required = metadata.requires("vllm-cpu") or []
    wanted = {
        found[1].removesuffix("+cpu") for line in required if (found := PINNED_TORCH.match(line))
    }
    assert set(PINNED_TORCH.findall(DOCKERFILES["cpu"].read_text())) == wanted


@EACH
def test_the_server_is_not_root_and_is_watched(name: str) -> None:
    assert int(said(name, "USER")[-1]) > 0  # a cluster cannot know that a name is not root's
    assert f"http://127.0.0.1:{said(name, 'EXPOSE')[-1]}/health" in said(name, "HEALTHCHECK")[-1]


def test_the_context_is_what_is_copied() -> None:
    """.dockerignore lets nothing else through, such as weights or keys that lie about."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied("cpu") | copied("cuda")


@EACH
@pytest.mark.slow
def test_wheels_can_be_built_from_what_is_copied(name: str, tmp_path: Path) -> None:
    """The image's own `pip wheel`, in a folder with nothing but the copied files.

    Without an isolated environment, which pip would have to download; so the backend of `HATCHED`
    need not be there, and their folders, which are copied whole, are left out.
    """
    for source in copied(name):
        target = tmp_path / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            shutil.copytree(ROOT / source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / source, target)
    (words,) = (
        found[0] for rest in said(name, "RUN") if (found := re.findall(r"pip wheel ([^&]*)", rest))
    )
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-build-isolation"]
    words = words.replace("/wheels", "wheels")
    command += [word for word in shlex.split(words) if word.removeprefix("./") not in HATCHED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (built,) = (tmp_path / "wheels").glob("vllm_dllm-*.whl")
    with zipfile.ZipFile(built) as wheel:
        assert "vllm_dllm/selftest/checkpoints/tiny-llada2/config.json" in wheel.namelist()
