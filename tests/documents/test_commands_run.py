"""The commands that need no server, each as it stands in a copy of the repository.

The commands of a block run one after the other, because one may use what another wrote.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.documents.commands import Block, Command, commands
from tests.support.documents.outcomes import check_outcome
from tests.support.documents.running import (
    all_blocks,
    asks_a_server,
    copied,
    filled_in,
    names_a_server,
    rows_for,
    shell,
    shortened,
)
from tests.support.documents.table import BENCHMARK, BENCHMARKS, NOT_RUN, QUICK, RUN_BY

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def plain(block: Block) -> list[Command]:
    """The commands of a block that run here."""
    return [
        command
        for command in commands(block)
        if not rows_for((*NOT_RUN, *RUN_BY), command)
        and command.program != "vllm serve"
        and not asks_a_server(command)
        and not BENCHMARK.search(command.text)
    ]


def is_quick(block: Block) -> bool:
    """Whether `make test` runs it: it takes seconds, or is the script that users read first."""
    return all(found.text in QUICK for found in plain(block)) or "LLM(model=" in block.text


def cases(blocks: list[Block]) -> list[object]:
    """Each text once."""
    found = {block.text: block for block in reversed(blocks)}.values()
    return [
        pytest.param(one, id=str(one), marks=[] if is_quick(one) else [pytest.mark.long])
        for one in found
    ]


BLOCKS = [block for block in all_blocks("shell") if plain(block)]
SCRIPTS = [
    block
    for block in all_blocks("python")
    if not names_a_server(block.text) and not rows_for((*NOT_RUN, *RUN_BY), block)
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", cases(BLOCKS))
def test_commands_of_a_block(block: Block, tmp_path: Path) -> None:
    root = copied(tmp_path)
    for command in plain(block):
        # Without the target `setup`: the environment is the one of the tests.
        done = shell(re.sub(r"^make ", "make -o setup ", shortened(command)), root)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        check_outcome(command, done.stdout + done.stderr)


@pytest.mark.parametrize("block", cases(SCRIPTS))
def test_scripts(block: Block, tmp_path: Path) -> None:
    """Those that generate print something."""
    root = copied(tmp_path)
    (root / "script.py").write_text(filled_in(block.text))
    done = shell("python script.py", root)
    assert done.returncode == 0, f"{block}\n{done.stderr[-4000:]}"
    if "print(" in block.text:
        assert done.stdout.strip(), block


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    """In a short form."""
    out = tmp_path / "out.json"
    options = BENCHMARKS[name].replace("OUT", str(out))
    interpreted = "TRITON_INTERPRET=1 " if "--quick" in options else ""
    done = shell(f"{interpreted}python {name} {options}", copied(tmp_path), timeout=1500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if "OUT" in BENCHMARKS[name]:
        assert json.loads(out.read_text())["results"]
