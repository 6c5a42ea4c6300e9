"""Files of prompts: one object of JSON in each line, with a prompt or with messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_dllm.ranges import shown

Row = dict[str, Any]


def read_prompts(path: Path, output: str = "") -> list[Row]:
    """The lines of a file, all of them checked; blank lines do not count.

    Args:
        path: the file.
        output: what the name "output" is needed for, which no line may then have.

    Raises:
        ValueError: names the line, and what is wrong with it.
    """
    rows = []
    # Only this ends a line: JSON may hold all other ends of lines that Python knows.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r")
            if text:
                rows.append(row := _checked(json.loads(text)))
                if output and "output" in row:
                    raise ValueError(f"the name 'output' is for {output}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return rows


def conversation(row: Row) -> list[Any]:
    """What a line asks, as messages."""
    return row.get("messages") or [{"role": "user", "content": row["prompt"]}]


def _checked(row: Any) -> Row:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError(f"{shown(row)} is not an object with a prompt or with messages")
    if not isinstance(row.get("prompt", ""), str):
        raise ValueError(f"a prompt is a text, got {shown(row['prompt'])}")
    messages = row.get("messages", [{"role": "user", "content": ""}])
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"messages are objects with a role and a content, got {shown(messages)}")
    if row.get("answer", "") is None:
        raise ValueError("an answer is null; leave out its name where none is known")
    return row


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or bool(message.get("tool_calls")))
    )
