"""Write and read traces as lines of JSON, one for each answer, which viewers show.

    {"name": "sort 61 35", "texts": {"17": "2", "20": "5"}, "trace": {...}}

``trace`` is the ``diffusion_trace`` of an answer over HTTP. ``texts`` has the text of each token id
that occurs; an id without text is shown as a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm_dllm.tracing.trace import VERSION


class LineError(ValueError):
    """A line is not a trace; the message has its number and says what is wrong."""


def as_line(name: str, trace: dict[str, Any], text_of: Callable[[int], str]) -> str:
    """Make one line of JSON.

    Args:
        name: the name that viewers show for the answer, for example its prompt.
        trace: see `Trace.as_json`.
        text_of: returns the text of a token id.
    """
    texts = {str(token): text_of(token) for token in sorted(token_ids(trace["blocks"]))}
    return json.dumps({"name": name, "texts": texts, "trace": trace})


def token_ids(blocks: Iterable[dict[str, Any]]) -> set[int]:
    """The ids of all tokens in the blocks of a trace, which are plain values."""
    found: set[int] = set()
    for block in blocks:
        found.update(block["tokens"])
        found.update(event["token"] for event in block["events"] if event["token"] is not None)
    return found


def read_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The answers in a file, without its empty lines.

    Raises:
        LineError: a line is not a trace of this version.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise LineError(f"line {number} is not JSON: {error}") from None
        trace = found.get("trace") if isinstance(found, dict) else None
        if not isinstance(trace, dict) or not isinstance(trace.get("blocks"), list):
            raise LineError(f"line {number} has no trace with blocks")
        if trace.get("version") != VERSION:
            raise LineError(
                f"line {number} has version {trace.get('version')!r} of traces; this package reads "
                f"{VERSION}"
            )
        yield {
            "name": str(found.get("name", f"answer {number}")),
            "texts": found.get("texts") or {},
            "trace": trace,
        }
