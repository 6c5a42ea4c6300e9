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
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.records import Record, RefusedError  # noqa: E402
from benchmarks.tables import TABLES, section  # noqa: E402

DOCUMENTS = [
    ROOT / "docs" / name
    for name in (
        *("fidelity.md", "performance.md", "scaling.md"),
        *("structured_output.md", "tiny_models.md"),
    )
]
# No table is made from result files whose names begin so; docs/reliability.md,
# docs/deployment.md, docs/kv_transfer.md and docs/scaling.md quote them.
WITHOUT_TABLES = ("drain", "fuzz", "kv", "ray", "soak")
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
        from benchmarks.plots import draw_all

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
