"""Documents: links lead somewhere, figures come from result files, the README stays short."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import report

ROOT = Path(__file__).resolve().parent.parent
AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*AT_THE_TOP, *PAGES]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MOST_LINES = 150

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]*`")
NAMED = re.compile(r"`([\w.-]+/[\w./-]*\w)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:")
HEADING = re.compile(r"^(#+) (.+)$")


def text_of(document: str) -> str:
    """A document without its fenced code."""
    return FENCED.sub("", (ROOT / document).read_text("utf-8"))


def links(document: str) -> Iterator[str]:
    """Where a document's links lead, but for those to other sites."""
    for target in LINK.findall(INLINE.sub("code", text_of(document))):
        if not EXTERNAL.match(target):
            yield target


def sections(document: str) -> dict[str, str]:
    """The text below each heading, its subsections included, by the heading's anchor."""
    found: dict[str, tuple[int, list[str]]] = {}
    seen: dict[str, int] = {}
    open_ones: list[str] = []
    for line in text_of(document).splitlines():
        if heading := HEADING.match(line):
            level, title = len(heading[1]), heading[2].strip().lower()
            anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            count = seen[anchor] = seen.get(anchor, -1) + 1
            anchor = f"{anchor}-{count}" if count else anchor
            open_ones = [one for one in open_ones if found[one][0] < level]
            open_ones.append(anchor)
            found[anchor] = level, []
        for one in open_ones:
            found[one][1].append(line)
    return {anchor: "\n".join(lines) for anchor, (_, lines) in found.items()}


def fault(document: str, target: str) -> str | None:
    """What is wrong with a link, if anything."""
    path, _, anchor = target.partition("#")
    if path.startswith("/"):
        return f"{target}: not a relative path"
    place = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
    place = place if path else document
    if not (ROOT / place).exists():
        return f"{target}: no such file"
    if anchor and anchor not in sections(place):
        return f"{target}: no such heading"
    return None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert [found for target in links(document) if (found := fault(document, target))] == []


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("docs/no_such_page.md", "no such file"),
        ("docs/settings.md#no-such-heading", "no such heading"),
        ("#no-such-heading", "no such heading"),
        ("/docs/settings.md", "not a relative path"),
        ("docs/settings.md#decoding-algorithms", None),
        ("LICENSE", None),
    ],
)
def test_a_planted_link_is_judged(target: str, complaint: str | None) -> None:
    found = fault("README.md", target)
    assert found == (complaint and f"{target}: {complaint}")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    """Paths of this repository in code style, from its top or from the package."""
    tops = [path.name for path in (*ROOT.iterdir(), *(ROOT / "vllm_dllm").iterdir())]
    absent = [
        named
        for named in NAMED.findall(text_of(document))
        if named.split("/")[0] in tops
        and not any((top / named).exists() for top in (ROOT, ROOT / "vllm_dllm"))
    ]
    assert absent == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_LINES


def test_every_page_and_plot_can_be_reached() -> None:
    reached = {
        posixpath.normpath(posixpath.join(posixpath.dirname(document), target.partition("#")[0]))
        for document in DOCUMENTS
        for target in links(document)
    }
    plots = [str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "img").glob("*.svg")]
    assert plots
    assert {*PAGES, *plots} - reached == set()


def test_tables_are_those_of_the_result_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_figures_of_the_readme_are_in_the_section_that_each_links_to() -> None:
    rows = [line for line in sections("README.md")["results"].splitlines() if "](docs/" in line]
    assert len(rows) == 4
    for row in rows:
        _, what, result, _ = row.split("|")
        ((page, anchor),) = [target.split("#") for target in LINK.findall(what)]
        there = set(re.findall(r"[\d.,]*\d", sections(page)[anchor]))
        figures = set(re.findall(r"[\d.,]*\d", result))
        assert figures and figures <= there, f"{what}: {figures - there}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded(path: Path) -> None:
    """Nobody's token may write, no job runs for ever, and actions keep their major version."""
    workflow: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
