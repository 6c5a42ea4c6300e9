"""Result files into Markdown tables, plots, and the tables of the documents.

    .venv/bin/python benchmarks/report.py            # print tables, draw plots, refresh documents
    .venv/bin/python benchmarks/report.py --check    # write nothing; 1 where a document is stale

In a document a table stands between `<!-- benchmark: NAME -->` and `<!-- /benchmark -->`, each on
a line of its own; what is between them is replaced. NAMEs are the keys of `TABLES` in
`benchmarks/tables.py`. A file that cannot be used is refused by name and the rest goes on; the
exit code is then 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.tables import TABLES, Record, RefusedError, section  # noqa: E402

DOCUMENTS = [
    ROOT / "docs" / name
    for name in ("fidelity.md", "performance.md", "structured_output.md", "tiny_models.md")
]
# No table is made from result files whose names begin so.
WITHOUT_TABLES = ("fuzz", "ops", "soak")
# Colours that can be told apart without telling red from green, and in greyscale.
BLUE, ORANGE, GREY = "#1f6fb4", "#e07b1a", "#8a8a8a"
DARK = "#15354f"
# Equal figures give equal files: no date, stable ids, and text as text.
STYLE = {
    "svg.hashsalt": "vllm-dllm",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
METADATA = {"Date": None, "Creator": "benchmarks/report.py"}
INCHES = (5.2, 3.2)
BEGIN = re.compile(r"^<!-- benchmark: (.*?) -->$", re.MULTILINE)
END = re.compile(r"^<!-- /benchmark -->$", re.MULTILINE)


def read_all(results: Path) -> tuple[dict[str, Record], list[str]]:
    """Records by the file's stem, and why the other files are refused."""
    records, refused = {}, []
    for path in sorted(results.glob("*.json")):
        if path.stem.partition("_")[0] in WITHOUT_TABLES:
            continue
        try:
            records[path.stem] = Record.read(path)
        except RefusedError as error:
            refused.append(str(error))
    return records, refused


def refreshed(text: str, sections: Mapping[str, str]) -> str:
    """A document with the sections it asks for.

    Raises:
        RefusedError: a marker without its end or with a name that has no section.
    """
    parts, place = [], 0
    while begin := BEGIN.search(text, place):
        name = begin[1]
        end, following = END.search(text, begin.end()), BEGIN.search(text, begin.end())
        if end is None or (following and following.start() < end.start()):
            raise RefusedError(f"<!-- benchmark: {name} --> has no <!-- /benchmark -->")
        if name not in sections:
            available = ", ".join(sections) or "none"
            raise RefusedError(f"<!-- benchmark: {name} --> has no results; there are: {available}")
        parts += [text[place : begin.end()], f"\n{sections[name]}\n", end[0]]
        place = end.end()
    return "".join([*parts, text[place:]])


def stale(text: str, sections: Mapping[str, str]) -> list[str]:
    """Names of a document's tables that differ from the results."""
    fresh = refreshed(text, sections)
    return [
        marker[1]
        for marker, fresh_marker in zip(BEGIN.finditer(text), BEGIN.finditer(fresh), strict=True)
        if text[marker.end() : END.search(text, marker.end()).start()]
        != fresh[fresh_marker.end() : END.search(fresh, fresh_marker.end()).start()]
    ]


def all_sections(records: Mapping[str, Record]) -> tuple[dict[str, str], list[str]]:
    """The text of each table whose files are there, and why others are refused."""
    sections, refused = {}, []
    for name, table in TABLES.items():
        if any(stem in records for stem in table.files):
            try:
                sections[name] = section(name, records)
            except RefusedError as error:
                refused.append(str(error))
    return sections, refused


def see_to(document: Path, sections: Mapping[str, str], check: bool) -> list[str]:
    """Refresh a document's tables, or only check them; returns what is wrong with it."""
    text = document.read_text(encoding="utf-8")
    try:
        if check:
            return [
                f"{document.name}: the table {name} is not what the results say; run "
                "benchmarks/report.py"
                for name in stale(text, sections)
            ]
        fresh = refreshed(text, sections)
    except RefusedError as error:
        return [f"{document.name}: {error}"]
    if fresh != text:
        document.write_text(fresh, encoding="utf-8")
    return []


@dataclass(frozen=True)
class Plot:
    """A plot: the kind of benchmark, the stems of its files, and the drawing function."""

    kind: str
    files: tuple[str, ...]
    draw: Callable[..., None]
    panels: int = 1


def draw_all(records: Mapping[str, Record], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the plots whose files exist; returns them, and why others are refused."""
    drawn, refused = [], []
    for name, plot in PLOTS.items():
        if not all(stem in records for stem in plot.files):
            continue
        try:
            drawn.append(draw(name, [records[stem] for stem in plot.files], folder))
        except RefusedError as error:
            refused.append(str(error))
    return drawn, refused


def draw(name: str, records: list[Record], folder: Path) -> Path:
    """Draw one plot.

    Raises:
        RefusedError: no matplotlib, a file of another benchmark, or results laid out otherwise.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError(
            f"plot {name}: matplotlib is not installed; pip install 'vllm-dllm[dev]'"
        ) from error

    plot, names = PLOTS[name], ", ".join(record.name for record in records)
    if any(record.kind != plot.kind for record in records):
        raise RefusedError(f"plot {name}: {names}: not all of {plot.kind}")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(INCHES[0] * (1 + 0.4 * (plot.panels - 1)), INCHES[1]))
        axes = figure.subplots(1, plot.panels, squeeze=False)[0]
        try:
            plot.draw(*axes, *(record.results for record in records))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RefusedError(
                f"plot {name}: {names}: not the layout of today's {plot.kind} "
                f"({type(error).__name__}: {error}); run the benchmark again"
            ) from error
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.svg"
        figure.savefig(path, format="svg", metadata=METADATA)
    return path


def bars(
    axis: Any, groups: list[str], series: Mapping[str, list[float]], colours: list[str]
) -> None:
    """Draw bars side by side, a group for each load, with their values on top."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [n + (number - (len(series) - 1) / 2) * width for n in range(len(groups))]
        drawn = axis.bar(places, values, 0.92 * width, label=name, color=colours[number])
        axis.bar_label(drawn, [f"{value:.0f}" for value in values], fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), groups)


def gemma(left: Any, right: Any, tiny: Mapping[str, Any], wide: Mapping[str, Any]) -> None:
    names = {"vllm-dllm": "vllm-dllm", "native": "vLLM's class", "transformers": "transformers"}
    for axis, side, title in ((left, tiny, "272 ids"), (right, wide, "32,768 ids")):
        loads = list(side["vllm-dllm"])
        series = {
            name: [side[kind][load]["tokens_per_s"] for load in loads]
            for kind, name in names.items()
        }
        bars(axis, [load.removesuffix(" equal") for load in loads], series, [BLUE, ORANGE, GREY])
        axis.set(title=title, xlabel="requests")
    left.set_ylabel("tokens/s")
    left.legend()


def serve(axis: Any, results: Mapping[str, Any]) -> None:
    styles = [(BLUE, "o-"), (GREY, "s--"), (ORANGE, "o-"), (DARK, "s--"), (DARK, "^:")]
    used = styles[: len(results)]
    for (system, by_concurrency), (colour, style) in zip(results.items(), used, strict=True):
        speeds = [figures["output_throughput"] for figures in by_concurrency.values()]
        axis.plot([int(n) for n in by_concurrency], speeds, style, label=system, color=colour)
    axis.set_xscale("log", base=2)
    loads = [int(n) for n in next(iter(results.values()))]
    axis.set_xticks(loads, [str(load) for load in loads])
    axis.set(xlabel="requests at a time", ylabel="tokens/s")
    axis.legend()


PLOTS: dict[str, Plot] = {
    "gemma": Plot("gemma", ("gemma", "gemma_32k"), gemma, panels=2),
    "serve": Plot("serve", ("serve",), serve),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--documents", type=Path, nargs="+", default=DOCUMENTS)
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "img", help="for the plots")
    parser.add_argument("--check", action="store_true", help="write nothing, find stale tables")
    args = parser.parse_args(argv)
    records, refused = read_all(args.results)
    sections, further = all_sections(records)
    refused += further
    for document in args.documents:
        refused += see_to(document, sections, args.check)
    if not args.check:
        for name, body in sections.items():
            print(f"{name}\n\n{body}\n")
        drawn, further = draw_all(records, args.images)
        refused += further
        print("\n".join(str(path) for path in drawn))
    for line in refused:
        print(f"report: {line}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
