"""Result files become tables, plots and the README's tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import PLOTS, draw_all
from benchmarks.tables import KINDS, TABLES, Record, RefusedError, section

ROOT = Path(__file__).resolve().parents[2]
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
README = "Text.\n\n<!-- benchmark: serve -->\nold\n<!-- /benchmark -->\n\nMore text.\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "serve.json").write_text(json.dumps(RECORD))
    return folder


@pytest.fixture
def run(results: Path, tmp_path: Path) -> Callable[..., int]:
    """`report.py` on this test's own files."""
    (tmp_path / "README.md").write_text(README)
    places = (
        "--results",
        results,
        "--documents",
        tmp_path / "README.md",
        "--images",
        tmp_path / "i",
    )
    return lambda *more: report.main([*map(str, places), *more])


def test_a_table_from_a_file(results: Path) -> None:
    text = section("serve", {"serve": Record.read(results / "serve.json")})
    header, rule, row, _, source = text.split("\n")
    assert row == ROW
    assert header.count("|") == rule.count("|") == row.count("|")
    assert source == (
        "(`benchmarks/results/serve.json`: commit 0123456; A Processor, 2 cores; "
        "vLLM 0.32.0+cpu, torch 2.13.0+cpu)"
    )


def test_the_load_is_told_where_it_was_kept(results: Path) -> None:
    machine = RECORD["machine"] | {"load_average": [3.14, 2, 1]}
    (results / "serve.json").write_text(json.dumps(RECORD | {"machine": machine, "modified": True}))
    source = Record.read(results / "serve.json").source()
    assert "2 cores, load average 3.1;" in source
    assert "0123456 with uncommitted changes;" in source


def test_the_readme_is_refreshed_and_then_passes_the_check(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--check") == 1
    assert "the table serve is not what the results say" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == README, "--check writes nothing"
    assert not (tmp_path / "i").exists()
    assert run() == 0
    text = (tmp_path / "README.md").read_text()
    assert ROW in text
    assert text.startswith("Text.\n\n<!-- benchmark: serve -->\n| system")
    assert text.endswith(")\n<!-- /benchmark -->\n\nMore text.\n")
    assert run("--check") == 0
    assert run() == 0
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "i" / "serve.svg").read_text().startswith("<?xml")


def test_a_figure_changed_by_hand_is_found(run: Callable[..., int], tmp_path: Path) -> None:
    run()
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("100, 52", "100, 53"))
    assert run("--check") == 1


def test_a_document_of_this_repository_in_a_copy() -> None:
    """With each of its result files' tables put in: what is written is what the check accepts."""
    records, _ = report.read_all(ROOT / "benchmarks" / "results")
    sections, refused = report.all_sections(records)
    assert not refused
    copy = (ROOT / "docs" / "performance.md").read_text()
    for name in sections:
        if f"<!-- benchmark: {name} -->" not in copy:
            copy += f"\n<!-- benchmark: {name} -->\n<!-- /benchmark -->\n"
    fresh = report.refreshed(copy, sections)
    assert report.stale(copy, sections) or copy == fresh
    assert not report.stale(fresh, sections)
    assert all(body in fresh for body in sections.values())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "other.json: not JSON"),
        ("[]", "other.json: not a JSON object"),
        (json.dumps({"benchmark": "serve", "results": {}}), "other.json: has no command, commit"),
        (json.dumps(RECORD | {"benchmark": "poetry"}), "other.json: unknown benchmark 'poetry'"),
    ],
)
def test_files_that_are_refused(
    run: Callable[..., int],
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    complaint: str,
) -> None:
    (results / "other.json").write_text(content)
    assert run() == 1
    assert complaint in capsys.readouterr().err
    assert ROW in (tmp_path / "README.md").read_text(), "the rest went on"


def test_another_layout_is_refused_with_the_files_name(results: Path) -> None:
    old = RECORD | {"results": {"llada2": {"4": {"tokens": 1}}}}
    (results / "serve.json").write_text(json.dumps(old))
    records, _ = report.read_all(results)
    sections, (refused,) = report.all_sections(records)
    assert not sections
    assert refused.startswith(
        "serve.json: not the layout of today's serve (KeyError: 'output_throughput')"
    )


def test_a_file_of_another_benchmark_is_refused(results: Path) -> None:
    (results / "gemma.json").write_text(json.dumps(RECORD))
    (results / "gemma_32k.json").write_text(json.dumps(RECORD))
    records, _ = report.read_all(results)
    with pytest.raises(RefusedError, match=r"gemma\.json: is of serve, table gemma of gemma"):
        section("gemma", records)
    del records["gemma_32k"]
    with pytest.raises(RefusedError, match=r"gemma_32k\.json is absent or refused"):
        section("gemma", records)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- benchmark: poetry -->\n<!-- /benchmark -->\n", "poetry --> has no results"),
        ("<!-- benchmark: serve -->\ntext\n", "serve --> has no <!-- /benchmark -->"),
        (
            "<!-- benchmark: serve -->\n<!-- benchmark: serve -->\n<!-- /benchmark -->\n",
            "serve --> has no <!-- /benchmark -->",
        ),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_markers_that_are_refused(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    complaint: str,
    check: bool,
) -> None:
    (tmp_path / "README.md").write_text(text)
    assert run(*["--check"] * check) == 1
    assert complaint in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text


def test_every_table_and_plot_is_of_a_known_benchmark() -> None:
    assert {table.kind for table in TABLES.values()} <= set(KINDS)
    assert {plot.kind for plot in PLOTS.values()} <= set(KINDS)


def test_plots_of_this_repositorys_results_are_the_same_each_time(tmp_path: Path) -> None:
    records, _ = report.read_all(ROOT / "benchmarks" / "results")
    drawn, refused = draw_all(records, tmp_path / "one")
    assert drawn and not refused
    draw_all(records, tmp_path / "other")
    for path in drawn:
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name
