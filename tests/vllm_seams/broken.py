"""Print what broke with the installed vLLM: python -m tests.vllm_seams.broken [JUNIT_XML].

`scripts/versions.sh` runs this after the tests; its status is 1 if anything broke. The names are
compared with those of the newest release that is recorded, without an engine, so that it works
where none starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.vllm_seams import seams
from tests.vllm_seams.signatures import (
    RECORD,
    installed,
    missing_imports,
    of_release,
    signature_of,
)


def changes() -> dict[str, tuple[str, str]]:
    """Each name that is not as recorded: its signature in the newest release, and here."""
    record = json.loads(RECORD.read_text())
    known = installed() if installed() in record["releases"] else record["releases"][-1]
    return {
        name: (before, now)
        for names in of_release(record, known).values()
        for name, before in names.items()
        if (now := signature_of(name)) != before
    }


def cases(report: Path) -> list[ElementTree.Element]:
    """The tests that ran; none if the run did not end."""
    return [*ElementTree.parse(report).iter("testcase")] if report.exists() else []


def failures(report: Path) -> list[str]:
    """The tests that failed, or the files that could not be collected."""
    return [
        f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::")
        for case in cases(report)
        if case.find("failure") is not None or case.find("error") is not None
    ]


def by_seam(page: str, changed: Mapping[str, tuple[str, str]]) -> list[str]:
    """The lines of the report on names that changed."""
    found, without = seams.by_seam(page, changed)
    groups = [(", ".join(seam.names), names) for seam, names in found.items()]
    lines = []
    for title, names in [*groups, ("of no seam", without)]:
        if names:
            lines.append(title)
            lines += [f"  {name}: {changed[name][1]}, was {changed[name][0]}" for name in names]
    return lines


if __name__ == "__main__":
    lines = [f"  {missing}" for missing in missing_imports()]
    lines = ["imports that are missing", *lines] if lines else []
    report = Path(sys.argv[1]) if sys.argv[1:] else None
    if report is not None and not cases(report):
        lines.append("no test ran to its end")
    lines += by_seam(seams.PAGE.read_text("utf-8"), changes())
    if report is not None and (failed := failures(report)):
        lines += ["tests that failed", *(f"  {test}" for test in failed)]
    print(f"== what broke with vLLM {installed()}, by seam of docs/seams.md")
    print("\n".join(lines or ["nothing"]))
    sys.exit(1 if lines else 0)
