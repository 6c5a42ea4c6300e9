"""Result files become tables, plots and the README's tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.plots import PLOTS, draw_all
from benchmarks.records import KINDS, Record, RefusedError
from benchmarks.tables import TABLES, section

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "sync": {"tokens_per_second": 100.0, "request_steps": 50, "p50_s": 0.2, "p99_s": 0.4},
    "fdfo": {"tokens_per_second": 150.0, "request_steps": 30, "p50_s": 0.1, "p99_s": 0.3},
}
RECORD = {
    "benchmark": "fdfo",
    "command": "benchmarks/fdfo.py --json out.json",
    "commit": "0123456789abcdef",
    "modified": False,
    "versions": {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu"},
    "machine": {"cpu": "A Processor", "cores": 2},
    "results": {"4": MODES},
}
ROW = "| 4 | 100 | 150 | 1.50x | 20 of 50 | 0.200 / 0.100 s | 0.400 / 0.300 s |"
README = "Text.\n\n<!-- benchmark: fdfo -->\nold\n<!-- /benchmark -->\n\nMore text.\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "fdfo.json").write_text(json.dumps(RECORD))
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
    text = section("fdfo", {"fdfo": Record.read(results / "fdfo.json")})
    header, rule, row, _, source = text.split("\n")
    assert row == ROW
    assert header.count("|") == rule.count("|") == row.count("|")
    assert source == (
        "(`benchmarks/results/fdfo.json`: commit 0123456; A Processor, 2 cores; "
        "vLLM 0.32.0+cpu, torch 2.13.0+cpu)"
    )


def test_the_load_is_told_where_it_was_kept(results: Path) -> None:
    machine = RECORD["machine"] | {"load_average": [3.14, 2, 1]}
    (results / "fdfo.json").write_text(json.dumps(RECORD | {"machine": machine, "modified": True}))
    source = Record.read(results / "fdfo.json").source()
    assert "2 cores, load average 3.1;" in source
    assert "0123456 with uncommitted changes;" in source


def test_the_readme_is_refreshed_and_then_passes_the_check(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--check") == 1
    assert "the table fdfo is not what the results say" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == README, "--check writes nothing"
    assert not (tmp_path / "i").exists()
    assert run() == 0
    text = (tmp_path / "README.md").read_text()
    assert ROW in text
    assert text.startswith("Text.\n\n<!-- benchmark: fdfo -->\n| requests")
    assert text.endswith(")\n<!-- /benchmark -->\n\nMore text.\n")
    assert run("--check") == 0
    assert run() == 0
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "i" / "fdfo.svg").read_text().startswith("<?xml")


def test_a_figure_changed_by_hand_is_found(run: Callable[..., int], tmp_path: Path) -> None:
    run()
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("1.50x", "1.60x"))
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
        (json.dumps({"benchmark": "fdfo", "results": {}}), "other.json: has no command, commit"),
        (json.dumps(RECORD | {"benchmark": "poetry"}), "other.json: unknown benchmark 'poetry'"),
        (json.dumps(RECORD | {"benchmark": "serving"}), "run benchmarks/serve.py in its place"),
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
    old = RECORD | {"results": {"4": {"sync": MODES["sync"]}}}
    (results / "fdfo.json").write_text(json.dumps(old))
    records, _ = report.read_all(results)
    sections, (refused,) = report.all_sections(records)
    assert not sections
    assert refused.startswith("fdfo.json: not the layout of today's fdfo (KeyError: 'fdfo')")


def test_a_file_of_another_benchmark_is_refused(results: Path) -> None:
    (results / "gemma.json").write_text(json.dumps(RECORD))
    (results / "gemma_32k.json").write_text(json.dumps(RECORD))
    records, _ = report.read_all(results)
    with pytest.raises(RefusedError, match=r"gemma\.json: is of fdfo, table gemma of gemma"):
        section("gemma", records)
    del records["gemma_32k"]
    with pytest.raises(RefusedError, match=r"gemma_32k\.json is absent or refused"):
        section("gemma", records)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- benchmark: poetry -->\n<!-- /benchmark -->\n", "poetry --> has no results"),
        ("<!-- benchmark: fdfo -->\ntext\n", "fdfo --> has no <!-- /benchmark -->"),
        (
            "<!-- benchmark: fdfo -->\n<!-- benchmark: fdfo -->\n<!-- /benchmark -->\n",
            "fdfo --> has no <!-- /benchmark -->",
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
    assert {table.kind for table in TABLES.values()} == set(KINDS)
    assert {plot.kind for plot in PLOTS.values()} <= set(KINDS)


def test_plots_of_this_repositorys_results_are_the_same_each_time(tmp_path: Path) -> None:
    records, _ = report.read_all(ROOT / "benchmarks" / "results")
    drawn, refused = draw_all(records, tmp_path / "one")
    assert drawn and not refused
    draw_all(records, tmp_path / "other")
    for path in drawn:
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name
