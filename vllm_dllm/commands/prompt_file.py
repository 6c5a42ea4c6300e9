"""Files of prompts: one object of JSON in each line, with a prompt or with messages."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vllm_dllm.ranges import shown

Row = dict[str, Any]


def read_prompts(path: Path, *taken: str) -> list[Row]:
    """The lines of a file but for blank ones; raises ValueError, also for `taken` names."""
    rows = []
    # Only this ends a line: JSON may hold all other ends of lines that Python knows.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r"):
                rows.append(_checked(json.loads(text), taken))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return rows


def conversation(row: Row) -> list[Any]:
    """Return the prompt of a line, as messages."""
    return row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]


def _checked(row: Any, taken: Collection[str]) -> Row:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError(f"{shown(row)} is not an object with a prompt or with messages")
    said = conversation(row)
    if not (isinstance(said, list) and said and all(map(_is_message, said))):
        asked = {name: row[name] for name in ("prompt", "messages") if name in row}
        raise ValueError(f"messages need a role and a content, and a prompt a text: {shown(asked)}")
    if names := [name for name in taken if name in row]:
        raise ValueError(f"the name {names[0]!r} is for --score-command")
    if row.get("answer", "") is None:
        raise ValueError("an answer may not be null")
    return row


def _is_message(one: Any) -> bool:
    known = isinstance(one, dict) and isinstance(one.get("role"), str)
    return known and bool(isinstance(one.get("content"), str | list) or one.get("tool_calls"))
