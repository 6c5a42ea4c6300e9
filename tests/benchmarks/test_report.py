"""Result files become tables and plots of the documents; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import report

FIGURES = {"output_throughput": 100.0, "median_e2el_ms": 52.0}
RECORD = {
    "benchmark": "serve",
    "command": "benchmarks/serve.py --json out.json",
    "commit": "0123456789abcdef",
    "modified": False,
    "versions": {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu"},
    "machine": {"cpu": "A Processor", "cores": 2},
    "results": {"llada2": {"4": FIGURES}},
}
ROW = "| llada2 | 100, 52 ms |"
SOURCE = "(`benchmarks/results/serve.json`: commit 0123456, A Processor, vLLM 0.32.0+cpu)"
README = "Text.\n\n<!-- benchmark: serve -->\nold\n<!-- /benchmark -->\n\nMore text.\n"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """`report.py` on this test's own files."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "serve.json").write_text(json.dumps(RECORD))
    (tmp_path / "README.md").write_text(README)
    options = {"results": "results", "documents": "README.md", "images": "i"}
    places = [word for name, at in options.items() for word in (f"--{name}", str(tmp_path / at))]
    return lambda *more: report.main([*places, *more])


def test_a_document_is_refreshed_and_then_passes_the_check(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    assert run("--check") == 1
    assert "the table serve is not what the results say" in capsys.readouterr().err
    assert readme.read_text() == README, "--check writes nothing"
    assert run() == 0
    text = readme.read_text()
    assert text.startswith("Text.\n\n<!-- benchmark: serve -->\n| system") and ROW in text
    assert text.endswith(f"\n{SOURCE}\n<!-- /benchmark -->\n\nMore text.\n")
    assert run("--check") == 0
    assert (tmp_path / "i" / "serve.svg").read_text().startswith("<?xml")
    readme.write_text(text.replace("100, 52", "100, 53"))
    assert run("--check") == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "other.json: not JSON"),
        (json.dumps({"benchmark": "serve", "results": {}}), "other.json: has no command, commit"),
        (json.dumps(RECORD | {"benchmark": "poetry"}), "other.json: unknown benchmark 'poetry'"),
    ],
)
def test_files_that_are_refused(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    complaint: str,
) -> None:
    (tmp_path / "results" / "other.json").write_text(content)
    assert run() == 1
    assert complaint in capsys.readouterr().err
    assert ROW in (tmp_path / "README.md").read_text(), "the rest went on"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- benchmark: poetry -->\n<!-- /benchmark -->\n", "poetry --> has no results"),
        ("<!-- benchmark: serve -->\ntext\n", "serve --> has no <!-- /benchmark -->"),
    ],
)
def test_markers_that_are_refused(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    complaint: str,
) -> None:
    (tmp_path / "README.md").write_text(text)
    assert run() == 1
    assert complaint in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text
