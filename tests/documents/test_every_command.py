"""Every command is accounted for, and its program accepts what the documentation gives it."""

from __future__ import annotations

import ast
import json
import tomllib
from typing import Any

import yaml

from tests.support.checkpoints import ROOT
from tests.support.documents.commands import Command, blocks, inline_commands, pages
from tests.support.documents.running import (
    all_blocks,
    all_commands,
    body,
    faults,
    filled_in,
    language_of,
    rows_for,
)
from tests.support.documents.table import BENCHMARK, BENCHMARKS, GPU, NOT_RUN, PROGRAMS, twin

PARSED = ("python", "vllm", "vllm-dllm")
READERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "python": ast.parse}
# Shown to a reader, and not read by anything here.
SHOWN = {"shell", "output", "mermaid"}


def test_every_command_is_accounted_for() -> None:
    found = [command for command in all_commands() if not rows_for(NOT_RUN, command)]
    assert len(found) > 60
    unknown = [str(one) for one in found if one.program.split(" ")[0] not in PROGRAMS]
    assert unknown == [], "say in tests/support/documents/table.py how they are run"
    named = {name for page in pages() for name in BENCHMARK.findall((ROOT / page).read_text())}
    assert named <= set(BENCHMARKS), "say there how they are run in a short form"


def test_every_block_can_be_read() -> None:
    known = {*READERS, *SHOWN}
    assert [str(b) for page in pages() for b in blocks(page) if language_of(b) not in known] == []
    for language, read in READERS.items():
        for block in all_blocks(language):
            read(block.text)


def requests() -> list[tuple[Command, dict[str, Any]]]:
    return [(command, sent) for command in all_commands() if (sent := body(command))]


def parsed() -> list[tuple[str, list[str]]]:
    """(where, words) of each command whose options a parser of its own can read."""
    found = []
    inline = [
        command
        for page in pages()
        for program in (r"\.venv/bin/python", "vllm-dllm")
        for command in inline_commands(page, program)
    ]
    for command in [*all_commands(), *inline]:
        first = command.program.partition(" ")[0]
        if first not in PARSED or {"pytest", "venv"} & {*command.words}:
            continue
        if command.words[0].startswith(".venv-ray/"):
            continue  # imports what this environment lacks; tests/cluster runs it
        if command.program == "vllm serve" and any(
            row.says == GPU for row in rows_for(NOT_RUN, command)
        ):
            continue  # refused here
        found.append((str(command), [first, *map(filled_in, command.words[1:])]))
    for command, sent in requests():
        if not rows_for(NOT_RUN, command):  # it may need what that test installs
            options = json.dumps(sent.get("vllm_xargs", {}))
            found.append((str(command), ["request", twin(sent["model"]) or "", options]))
    return found


def test_programs_accept_their_options() -> None:
    """A server's are followed up to its configuration, which refuses what cannot be served."""
    given = parsed()
    found = faults([words for _, words in given])
    wrong = [f"{where}\n  {f}" for (where, _), f in zip(given, found, strict=True) if f]
    assert wrong == [], "\n".join(wrong)
