"""Print what broke with the installed vLLM, by seam: python -m tests.vllm_seams.broken [JUNIT_XML].

`scripts/versions.sh` runs this after the tests; its status is 1 if anything broke. The names are
compared with those of the newest release that is recorded, without an engine, so that it works
where none starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.support.checkpoints import ROOT
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
    """The tests that failed, as pytest takes them, or the file if it cannot be collected."""
    found = []
    for case in cases(report):
        if case.find("failure") is None and case.find("error") is None:
            continue
        module, name = case.get("classname", ""), case.get("name", "")
        found.append("::".join(_split(f"{module}.{name}" if module else name)))
    return found


def _split(called: str) -> Iterator[str]:
    """A dotted name, without what is in brackets, as the path of its file and the rest."""
    plain, bracket, case = called.partition("[")
    words = plain.split(".")
    for end in range(len(words), 0, -1):
        path = "/".join(words[:end]) + ".py"
        if (ROOT / path).exists():
            yield path
            rest = "::".join(words[end:]) + bracket + case
            if rest:
                yield rest
            return
    yield called


def by_seam(page: str, changed: Mapping[str, tuple[str, str]], failed: Sequence[str]) -> list[str]:
    """The lines of the report; a test is named with each seam that it shows."""
    lines, left = [], set(failed)
    found, without = seams.by_seam(page, changed)
    for seam, names in found.items():
        tests = [test for test in failed if _is_in(test, seam.tests)]
        left -= {*tests}
        if names or tests:
            lines.append(", ".join(seam.names))
            lines += [f"  {name}: {changed[name][1]}, was {changed[name][0]}" for name in names]
            lines += [f"  {test}" for test in tests]
    if without or left:
        lines.append("of no seam")
        lines += [f"  {name}: {changed[name][1]}, was {changed[name][0]}" for name in without]
        lines += [f"  {test}" for test in failed if test in left]
    return lines


def _is_in(test: str, paths: Sequence[str]) -> bool:
    file = test.partition("::")[0]
    return any(file == path or file.startswith(f"{path}/") for path in paths)


if __name__ == "__main__":
    lines = [f"  {missing}" for missing in missing_imports()]
    lines = ["imports that are missing", *lines] if lines else []
    report = Path(sys.argv[1]) if sys.argv[1:] else None
    if report is not None and not cases(report):
        lines.append("no test ran to its end")
    failed = failures(report) if report is not None else []
    lines += by_seam(seams.PAGE.read_text("utf-8"), changes(), failed)
    print(f"== what broke with vLLM {installed()}, by seam of docs/seams.md")
    print("\n".join(lines or ["nothing"]))
    sys.exit(1 if lines else 0)
