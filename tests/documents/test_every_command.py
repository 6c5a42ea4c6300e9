"""Every command is accounted for, and its program accepts what the documentation gives it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.checkpoints import ROOT
from tests.support.documents import table
from tests.support.documents.commands import Block, Command, blocks, inline_commands, pages
from tests.support.documents.running import (
    all_blocks,
    all_commands,
    body,
    environment,
    filled_in,
    language_of,
    rows_for,
    unknown,
)

PARSED = ("python", "vllm", "vllm-dllm")
READERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "python": ast.parse}
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_there_are_commands() -> None:
    """On these pages at least; the reader of blocks has not gone blind."""
    found = {command.page for command in all_commands()}
    assert {"README.md", "docs/settings.md", "docs/structured_output.md"} <= found
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.py")} <= found
    assert len(all_commands()) > 60


def test_every_command_is_accounted_for() -> None:
    assert unknown(all_commands()) == [], "say in tests/support/documents/table.py how they are run"


def test_every_language_is_known() -> None:
    known = {*READERS, "shell", "output"}
    assert [str(b) for page in pages() for b in blocks(page) if language_of(b) not in known] == []


@pytest.mark.parametrize("language", READERS)
def test_blocks_can_be_read(language: str) -> None:
    for block in all_blocks(language):
        READERS[language](block.text)


@pytest.mark.parametrize("rows", ["OUTPUT", "NOT_RUN", "RUN_BY", "QUICK"])
def test_every_row_is_needed(rows: str) -> None:
    found: list[Block | Command] = [*all_commands(), *all_blocks("python")]
    if rows == "OUTPUT":
        found = [block for page in pages() for block in blocks(page)]
    listed = getattr(table, rows)
    assert [row for row in listed if not any(row in rows_for(listed, one) for one in found)] == []


def test_every_other_entry_is_needed() -> None:
    """What stands for models and placeholders, and what makes commands short."""
    words = {word for command in all_commands() for word in command.words}
    assert {*table.SHORTER} - words == set()
    text = "\n".join((ROOT / page).read_text("utf-8") for page in pages())
    assert [pattern for pattern in table.TWINS if not re.search(pattern, text)] == []
    assert [word for word in table.PLACEHOLDERS if word not in text] == []


def test_no_command_has_two_rows() -> None:
    listed = (*table.NOT_RUN, *table.RUN_BY)
    assert [str(found) for found in all_commands() if len(rows_for(listed, found)) > 1] == []


@pytest.mark.parametrize("row", table.RUN_BY, ids=lambda row: f"{row.page}-{row.begins}")
def test_tests_that_run_a_command_exist(row: table.Row) -> None:
    path, _, name = row.says.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in names


def test_make_knows_every_target() -> None:
    """Those in the text, too, and what they stand for can be worked out."""
    named = [command for page in pages() for command in inline_commands(page, "make")]
    named += [command for command in all_commands() if command.program.startswith("make")]
    assert len(named) > 15
    assert [str(command) for command in named if command.words[1] not in TARGETS] == []
    for target in sorted({command.words[1] for command in named} - {"help"}):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def parsed() -> list[tuple[str, list[str]]]:
    """(where, words) of each command whose options a parser of its own can read."""
    found = []
    inline = [
        command
        for page in pages()
        for program in (r"\.venv/bin/python", "vllm-dllm")
        for command in inline_commands(page, program)
    ]
    assert len(inline) > 3
    for command in [*all_commands(), *inline]:
        first = command.program.partition(" ")[0]
        if first not in PARSED or {"pytest", "timeit", "venv"} & {*command.words}:
            continue
        if command.words[0].startswith(".venv-ray/"):
            continue  # imports what this environment lacks; tests/cluster runs it
        words = [filled_in(word) for word in command.words[1:]]
        found.append((str(command), [first, *words]))
    for command, sent in requests():
        if rows_for(table.RUN_BY, command):
            continue  # it may need what that test installs
        options = json.dumps(sent.get("vllm_xargs", {}))
        found.append((str(command), ["request", table.twin(sent["model"]) or "", options]))
    return found


def requests() -> list[tuple[Command, dict[str, Any]]]:
    """The commands that send JSON to a server, and what they send."""
    return [(command, sent) for command in all_commands() if (sent := body(command))]


def test_programs_accept_their_options() -> None:
    given = parsed()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.children.parse_child",
            json.dumps([w for _, w in given]),
        ],
        cwd=ROOT,
        env=environment(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    faults = json.loads(done.stdout.splitlines()[-1])
    wrong = [f"{where}\n  {f}" for (where, _), f in zip(given, faults, strict=True) if f]
    assert wrong == [], "\n".join(wrong)


def test_pytest_is_given_files_that_exist() -> None:
    given = [command for command in all_commands() if "pytest" in command.words]
    assert len(given) >= 2
    for command in given:
        files = [word for word in command.words if word.startswith("tests")]
        assert files and all((ROOT / file).exists() for file in files), command


def test_every_request_has_a_model() -> None:
    """Whose tiny twin is known."""
    found = requests()
    assert len(found) >= 6
    assert [str(command) for command, sent in found if table.twin(sent["model"]) is None] == []


def test_every_family_has_a_request_and_a_twin_each() -> None:
    """In README and among the settings."""
    for page in ("README.md", "docs/settings.md"):
        asked = {table.twin(sent["model"]) for command, sent in requests() if command.page == page}
        names = {Path(path).name for path in asked if path}
        assert names >= {"tiny-llada2", "tiny-sdar", "tiny-diffusiongemma"}, page
