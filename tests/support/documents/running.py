"""Running the documentation's commands in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.checkpoints import ROOT
from tests.support.child import in_child
from tests.support.documents.commands import Block, Command, blocks, commands, pages
from tests.support.documents.table import (
    CLIENTS,
    OUTPUT,
    PLACEHOLDERS,
    SHORTER,
    TWINS,
    Row,
    twin,
)
from tests.support.forked import ENVIRONMENT
from tests.support.server import AS_SERVED

ADDRESS = re.compile(r"\b(localhost|127\.0\.0\.1|0\.0\.0\.0):8000\b")
SHELL = {"", "sh", "bash", "shell"}
# As much as a test needs, for scripts that make an engine of their own.
SMALL = "enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=1 << 26"
NOT_COPIED = (".git", ".venv*", ".cache", ".*_cache", "site", "*.egg-info", "__pycache__")


def rows_for(rows: tuple[Row, ...], found: Block | Command) -> list[Row]:
    return [row for row in rows if row.matches(found.page, found.text)]


def all_blocks(language: str) -> list[Block]:
    """The blocks of all pages in a language; an indented block may be Python as well."""
    return [block for page in pages() for block in blocks(page) if language_of(block) == language]


def language_of(block: Block) -> str:
    """`shell`, `output`, `python`, or what follows the fence."""
    if block.language in SHELL:
        if rows_for(OUTPUT, block):
            return "output"
        python = re.match(r"(from [\w.]+ )?import \w", block.text)
        return "python" if python and not block.language else "shell"
    return block.language


def all_commands() -> list[Command]:
    return [command for block in all_blocks("shell") for command in commands(block)]


def asks_a_server(command: Command) -> bool:
    """Whether it needs a server at localhost:8000: curl, clients of vLLM, scripts that say so."""
    if (
        command.program == "curl"
        or command.text.startswith(CLIENTS)
        or names_a_server(command.text)
    ):
        return True
    script = command.words[1] if command.program == "python" else ""
    return (ROOT / script).is_file() and names_a_server((ROOT / script).read_text())


def names_a_server(text: str) -> bool:
    return ADDRESS.search(text) is not None


def body(command: Command) -> dict[str, Any]:
    """The JSON that a command of curl sends; empty for other commands and without `-d`."""
    words = command.words
    sends = command.program == "curl" and "-d" in words
    return json.loads(words[words.index("-d") + 1]) if sends else {}


def filled_in(text: str) -> str:
    """A text of the documentation with tiny checkpoints and real files where a reader fills in."""
    names = "|".join(TWINS)
    text = re.sub(rf"(?<![\w./-])({names})(?![\w/-])", lambda name: twin(name[0]) or "", text)
    for placeholder, value in PLACEHOLDERS.items():
        text = re.sub(rf"(?<![\w./-]){re.escape(placeholder)}(?![\w.-])", value, text)
    return text.replace("LLM(model=", f"LLM({SMALL}, model=")


def shortened(command: Command) -> str:
    text = filled_in(command.text)
    short = [SHORTER[word] for word in command.words if word in SHORTER]
    return " ".join([text, *short])


def copied(target: Path) -> Path:
    """A copy of the repository in which commands run, with the environment of the tests."""
    copy = target / "repository"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (copy / ".venv").symlink_to(sys.prefix)
    for path in PLACEHOLDERS.values():
        if path.endswith(".jpg"):
            Image.new("RGB", (64, 48), "red").save(copy / path)
    if (ROOT.parent / "shared").is_dir():
        (target / "shared").symlink_to(ROOT.parent / "shared")
    return copy


def environment(root: Path) -> dict[str, str]:
    """Variables for commands: the code is that of the copy, the programs those of the tests."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    # A gigabyte of KV cache where none is said: on a CPU vLLM takes nearly all memory for it.
    own = {"PYTHONPATH": str(root), "PATH": path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return os.environ | ENVIRONMENT | AS_SERVED | own


def shell(text: str, root: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text],
        cwd=root,
        env=environment(root),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def faults(given: list[list[str]]) -> list[str | None]:
    """What is wrong with each of these commands, if anything; see `parse_child`."""
    return in_child("tests.support.children.parse_child:faults", given, env=environment(ROOT))
