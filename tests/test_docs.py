"""Documents: files that they name exist, and figures come from result files.

`make docs` finds links that lead nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vllm_dllm
from benchmarks import report

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w.-]+/[\w./-]*\w)`")


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
