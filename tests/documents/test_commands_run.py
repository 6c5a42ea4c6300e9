"""The commands that need no server, each as it stands in a copy of the repository.

The commands of a block run one after the other, because one may use what another wrote.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents.commands import Block, Command, commands
from tests.support.documents.outcomes import OUTCOMES
from tests.support.documents.running import (
    all_blocks,
    asks_a_server,
    copied,
    filled_in,
    names_a_server,
    rows_for,
    shell,
    shortened,
    to_run,
)
from tests.support.documents.table import BENCHMARK, NOT_RUN, QUICK, RUN_BY

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def plain(block: Block) -> list[Command]:
    """The commands of a block that run here."""
    return [
        command
        for command in commands(block)
        if command in to_run()
        and command.program != "vllm serve"
        and not asks_a_server(command)
        and not BENCHMARK.search(command.text)  # test_benchmarks_run.py
    ]


def is_long(block: Block, seen: set[str]) -> bool:
    """Whether `make test-long` runs a block: not if it is quick, the first time that it occurs."""
    texts = {found.text.replace(".venv/bin/", "") for found in plain(block)}
    new = texts - seen
    seen |= texts
    return not new or not all(rows_for(QUICK, found) for found in plain(block))


def is_first(block: Block) -> bool:
    """Whether a script is the one that every user reads first."""
    return block.page == "README.md" and "LLM(" in block.text


SEEN: set[str] = set()
BLOCKS = [
    pytest.param(block, id=str(block), marks=[pytest.mark.long] if is_long(block, SEEN) else [])
    for block in all_blocks("shell")
    if plain(block)
]
# A class in a file of its own is described on these pages; the others are scripts.
SCRIPTS = [
    pytest.param(block, id=str(block), marks=[] if is_first(block) else [pytest.mark.long])
    for block in all_blocks("python")
    if not names_a_server(block.text) and not rows_for((*NOT_RUN, *RUN_BY), block)
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", BLOCKS)
def test_commands_of_a_block(block: Block, tmp_path: Path) -> None:
    root = copied(tmp_path)
    for command in plain(block):
        done = shell(with_make(shortened(command)), root)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        check_outcome(command, done.stdout + done.stderr)


def with_make(text: str) -> str:
    """`make` without its target `setup`: the environment is the one of the tests."""
    return re.sub(r"^make ", "make -o setup ", text)


def check_outcome(command: Command, output: str) -> None:
    """What the documentation's examples print is known, where they ask the tiny models."""
    names = [Path(word).name for word in command.words if word.startswith("examples/")]
    if names and "--model" not in command.words:
        assert re.search(OUTCOMES[names[0]], output, re.DOTALL), f"{command}\n{output[-2000:]}"


@pytest.mark.parametrize("block", SCRIPTS)
def test_scripts(block: Block, tmp_path: Path) -> None:
    """Those that generate print something."""
    root = copied(tmp_path)
    (root / "script.py").write_text(filled_in(block.text))
    done = shell("python script.py", root)
    assert done.returncode == 0, f"{block}\n{done.stderr[-4000:]}"
    if "print(" in block.text:
        assert done.stdout.strip(), block
