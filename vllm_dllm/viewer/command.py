"""``vllm-dllm trace``: a page that shows traces."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_dllm.viewer.lines import LineError, read_lines
from vllm_dllm.viewer.page import page


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("file", type=Path, help="lines of JSON, one for each answer; - for stdin")
    parser.add_argument(
        "--html", type=Path, required=True, metavar="FILE", help="the page to write"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page; returns the exit status."""
    try:
        if str(args.file) == "-":
            answers = list(read_lines(sys.stdin))
        else:
            # A model's text may hold half of a surrogate pair, which JSON carries as `\ud800`.
            with args.file.open(encoding="utf-8", errors="replace") as lines:
                answers = list(read_lines(lines))
        if not answers:
            raise LineError("it has no trace")
        args.html.write_text(page(answers), encoding="ascii")
    except (OSError, LineError) as error:
        print(f"vllm-dllm trace: {args.file}: {error}", file=sys.stderr)
        return 1
    blocks = sum(len(answer["trace"]["blocks"]) for answer in answers)
    print(f"{args.html}: {len(answers)} answers with {blocks} blocks")
    return 0
