"""``vllm-dllm show-config``: how a server would decode a model, and where each value comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vllm_dllm.commands.asking import ask
from vllm_dllm.commands.environment import known_problem


def run(model: str, options: dict[str, Any]) -> int:
    """Print the settings that a server would have.

    Args:
        model: name or path of a model.
        options: options of vLLM's engine, by name.

    Returns:
        The exit status: 1, with the reason on stderr, if the server would refuse them.
    """
    problem = known_problem()
    if problem is None:
        answer = ask("explain", {"model": model, "options": options}, _files(model, options))
        problem = answer.problem or None
    if problem is not None:
        print(f"refused: {problem}", file=sys.stderr)
        return 1
    width = max(len(name) for name, _, _ in answer.content)
    for name, value, source in answer.content:
        print(f"{name:{width}}  {value:<16}  {source}")
    return 0


def _files(model: str, options: dict[str, Any]) -> list[str] | None:
    """The files that the answer depends on, with their times.

    None for the name of a model on a hub, which may have changed there.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    places = sorted(folder.iterdir())
    section = (options.get("additional_config") or {}).get("dllm")
    if isinstance(section, dict) and isinstance(section.get("config"), str):
        places.append(Path(section["config"]))
    return [f"{place}:{place.stat().st_mtime_ns}" for place in places if place.exists()]
