"""Questions that only vLLM can answer, put to a process of its own; the answers are kept.

Importing vLLM takes seconds. An answer holds until something that it depends on changes, so it is
kept in vLLM's cache folder under a fingerprint of all that. A refusal or a failure is never kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dllm.commands.environment import fingerprint

MOST_ANSWERS = 64
LIMIT_S = 180


@dataclass(frozen=True)
class Answer:
    """What the process said.

    Attributes:
        content: its answer; None if it has none.
        problem: why not, in one line.
        log: the last lines that it wrote; empty if all went well.
    """

    content: Any
    problem: str = ""
    log: str = ""


def ask(question: str, asked: dict[str, Any], depends_on: Sequence[str] | None = ()) -> Answer:
    """The answer of `vllm_dllm.commands.child` to a question, a kept one if there is one.

    Args:
        question: the name of one of its functions.
        asked: the function's arguments.
        depends_on: what the answer depends on beside the installation; None keeps no answer.
    """
    if depends_on is None:
        return _asked(question, asked)
    key = (question, json.dumps(asked, sort_keys=True), *depends_on)
    with contextlib.suppress(OSError, ValueError):
        return Answer(json.loads(_place(fingerprint(*key)).read_text("utf-8")))
    answer = _asked(question, asked)
    if not answer.problem:
        # vLLM may have written into its packages' folders, so the fingerprint is taken anew.
        with contextlib.suppress(OSError):
            _keep(_place(fingerprint(*key)), answer.content)
    return answer


def _asked(question: str, asked: dict[str, Any]) -> Answer:
    if sys.stderr.isatty():
        print("asking vLLM, which takes some seconds ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-") as folder:
        place = Path(folder, "answer.json")
        # -P: as for the command vllm, the working folder is no place of modules.
        command = ("-P", "-m", "vllm_dllm.commands.child", question, json.dumps(asked), str(place))
        child = subprocess.Popen(
            (sys.executable, *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            return Answer(None, f"vLLM gave no answer within {LIMIT_S} s", _text(output))
        if not place.exists():
            return Answer(None, f"the process ended with status {child.returncode}", _text(output))
        said = json.loads(place.read_text("utf-8"))
        return Answer(said.get("answer"), said.get("problem", ""), _text(output))


def _text(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").splitlines()[-30:])


def _place(name: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(home, "vllm")
    return Path(root, "dllm", "answers", f"{name}.json")


def _keep(place: Path, content: Any) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(content), "utf-8")
    draft.replace(place)
    kept = sorted(place.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
    for old in kept[:-MOST_ANSWERS]:
        old.unlink(missing_ok=True)
