"""The command ``vllm-dllm compat-report``."""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import re
import sys
from collections import Counter
from pathlib import Path

from vllm_dllm.compat import sources
from vllm_dllm.compat.comparison import KINDS, SIGNATURE, Change, compare
from vllm_dllm.compat.definitions import Definitions
from vllm_dllm.compat.fingerprints import RECORD, read, relied_on, take, write
from vllm_dllm.compat.scan import Scan, Use

PACKAGE = Path(__file__).resolve().parents[1]
# How many of the places that use something are printed; the JSON has all.
MOST_USES = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add(
        "target",
        nargs="?",
        help="a folder with a folder `vllm`, a wheel of vLLM, or a version; "
        "what is installed if it is not given",
    )
    add("--download", action="store_true", help="let pip fetch the wheel of a version")
    add("--json", action="store_true", help="print JSON")
    add(
        "--record",
        action="store_true",
        help="write down what the target has, as the vLLM that is tested; for developers",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0 if nothing that we rely on has changed, 1 if something has, 2 if there is no such vLLM.
    """
    try:
        source = sources.of_target(args.target, args.download)
    except sources.TargetError as error:
        print(f"vllm-dllm: {error}", file=sys.stderr)
        return 2
    # Half of the time would go into the search for garbage among syntax trees, and there is none.
    gc.disable()
    try:
        return _report(args, source)
    finally:
        gc.enable()


def _report(args: argparse.Namespace, source: sources.Source) -> int:
    vllm, scan = Definitions(source), Scan(PACKAGE)
    if args.record:
        recorded = take(relied_on(scan, vllm), vllm)
        write(recorded, source.version, RECORD)
        print(f"{len(recorded)} things of {source.name} recorded in {RECORD}")
        return 0
    tested, things = read(RECORD)
    changes = compare(things, scan, vllm)
    if args.json:
        print(json.dumps(_as_json(source, tested, len(things), changes), indent=1))
    else:
        print("\n".join(_as_text(source, tested, len(things), changes)))
    return 1 if changes else 0


def _as_text(source: sources.Source, tested: str, things: int, changes: list[Change]) -> list[str]:
    lines = []
    for kind in KINDS:
        ours = [change for change in changes if change.kind == kind]
        lines += [f"{kind} ({len(ours)})", *(line for c in ours for line in _lines(c)), ""] * bool(
            ours
        )
    counts = Counter(change.kind for change in changes)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    return [
        *lines,
        f"{source.name}, compared with {tested}, which is tested: of {things} functions, classes, "
        f"attributes and modules that we rely on {told or 'none has changed'}.",
    ]


def _lines(change: Change) -> list[str]:
    """A line for what has changed and where we use it, and its signatures where they differ."""
    places = [f"{file}:{line} {how}" for file, line, how in _by_line(change.uses)]
    more = len(places) - MOST_USES
    used = "; ".join(places[:MOST_USES]) + (f"; and {more} more" if more > 0 else "")
    lines = [f"  {change.what}    [{used}]"]
    if change.elsewhere:
        lines.append(f"    now in {', '.join(change.elsewhere)}")
    if change.kind == SIGNATURE:
        lines += [f"    {line}" for line in _differing(change.before, change.after)]
    return lines


def _differing(before: str, after: str) -> list[str]:
    """The parameters or fields in which two signatures differ, as lines of a diff."""
    old, new = (
        [part.strip(" ,;") for part in re.split(r"(?<=[,;(])|(?=\) ?->)", text)]
        for text in (before, after)
    )
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


def _by_line(uses: tuple[Use, ...]) -> list[Use]:
    """One use for each line, with all that the line does."""
    found: dict[tuple[str, int], list[str]] = {}
    for use in uses:
        found.setdefault((use.file, use.line), []).append(use.how)
    return [Use(file, line, ", ".join(sorted(set(how)))) for (file, line), how in found.items()]


def _as_json(
    source: sources.Source, tested: str, things: int, changes: list[Change]
) -> dict[str, object]:
    return {
        "target": source.name,
        "version": source.version,
        "tested": tested,
        "compared": things,
        "changes": [
            {
                "kind": change.kind,
                "what": change.what,
                "before": change.before,
                "after": change.after,
                "elsewhere": change.elsewhere,
                "uses": [use._asdict() for use in change.uses],
            }
            for change in changes
        ],
    }
