"""Documents: files that they name exist, figures come from result files, workflows are bounded.

`make docs` finds links that lead nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_dllm
from benchmarks import report

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RECIPES = sorted((ROOT / "examples" / "recipes").rglob("*.yaml"))
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w.-]+/[\w./-]*\w)`")
PICTURE = re.compile(r"```mermaid\n.*?```", re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    """Paths of this repository in code style, from its top or from the package."""
    tops = [path.name for path in (*ROOT.iterdir(), *(ROOT / "vllm_dllm").iterdir())]
    absent = [
        named
        for named in NAMED.findall(FENCED.sub("", (ROOT / document).read_text("utf-8")))
        if named.split("/")[0] in tops
        and not any((top / named).exists() for top in (ROOT, ROOT / "vllm_dllm"))
    ]
    assert absent == []


def test_the_picture_of_the_architecture_is_one() -> None:
    of_readme, of_structure = (
        PICTURE.findall((ROOT / path).read_text("utf-8"))
        for path in ("README.md", "docs/structure.md")
    )
    assert of_readme == of_structure and len(of_readme) == 1


def test_tables_are_those_of_the_result_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_figures_of_the_readme_are_on_the_page_that_each_links_to() -> None:
    results = (ROOT / "README.md").read_text("utf-8").split("## Results")[1].split("\n## ")[0]
    rows = [line for line in results.splitlines() if "](docs/" in line]
    assert len(rows) == 4
    for row in rows:
        _, what, result, _ = row.split("|")
        page = re.findall(r"\((docs/\w+\.md)#", what)[0]
        there = set(re.findall(r"[\d.,]*\d", (ROOT / page).read_text("utf-8")))
        figures = set(re.findall(r"[\d.,]*\d", result))
        assert figures and figures <= there, f"{what}: {figures - there}"


def test_the_first_entry_of_the_changelog_is_this_version() -> None:
    (first, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first == vllm_dllm.__version__


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded(path: Path) -> None:
    """No job runs for ever, and none may write unless it says what."""
    workflow: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_of_the_model_that_its_path_names(path: Path) -> None:
    recipe = yaml.safe_load(path.read_text("utf-8"))
    name = f"{path.parent.name}/{path.stem}"
    assert recipe["model"]["model_id"] == name and f"vllm serve {name}" in recipe["guide"]
