"""The commands of the documentation, as they stand, in a copy of the repository.

The commands of a block run one after the other, because one may use what another wrote. What asks a
server is sent to one server for each tiny model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.documents.commands import Block, Command, commands
from tests.support.documents.running import (
    ADDRESS,
    all_blocks,
    all_commands,
    asks_a_server,
    body,
    copied,
    environment,
    filled_in,
    names_a_server,
    rows_for,
    shell,
    shortened,
)
from tests.support.documents.table import (
    BENCHMARK,
    BENCHMARKS,
    NOT_RUN,
    QUICK,
    check_outcome,
    twin,
)
from tests.support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def is_run(found: Command | Block) -> bool:
    return not rows_for(NOT_RUN, found)


def plain(block: Block) -> list[Command]:
    return [
        command
        for command in commands(block)
        if is_run(command)
        and command.program != "vllm serve"
        and not asks_a_server(command)
        and not BENCHMARK.search(command.text)
    ]


def is_quick(block: Block) -> bool:
    """Whether `make test` runs it: it takes seconds, or is the script that users read first."""
    return all(found.text in QUICK for found in plain(block)) or "LLM(model=" in block.text


def cases(blocks: list[Block]) -> list[object]:
    found = {block.text: block for block in reversed(blocks)}.values()
    return [
        pytest.param(one, id=str(one), marks=[] if is_quick(one) else [pytest.mark.long])
        for one in found
    ]


BLOCKS = [block for block in all_blocks("shell") if plain(block)]
SCRIPTS, CLIENTS = (
    [one for one in all_blocks("python") if is_run(one) and names_a_server(one.text) == asks]
    for asks in (False, True)
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", cases(BLOCKS))
def test_commands_of_a_block(block: Block, tmp_path: Path) -> None:
    root = copied(tmp_path)
    for command in plain(block):
        # Without the target `setup`: the environment is the one of the tests.
        done = shell(re.sub(r"^make ", "make -o setup ", shortened(command)), root)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        check_outcome(command.words, done.stdout + done.stderr)


@pytest.mark.parametrize("block", cases(SCRIPTS))
def test_scripts(block: Block, tmp_path: Path) -> None:
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
    out = tmp_path / "out.json"
    options = BENCHMARKS[name].replace("OUT", str(out))
    interpreted = "TRITON_INTERPRET=1 " if "--quick" in options else ""
    done = shell(f"{interpreted}python {name} {options}", copied(tmp_path), timeout=1500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if "OUT" in BENCHMARKS[name]:
        assert json.loads(out.read_text())["results"]


# ---- what asks a server

LLADA2 = TINY_LLADA2.relative_to(ROOT).as_posix()
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "1024")


ASKING = [command for command in all_commands() if is_run(command) and asks_a_server(command)]


def asked(client: Command | Block) -> str:
    """The tiny checkpoint that a client asks: that of its JSON, else `TINY_LLADA2`'s."""
    sent = body(client) if isinstance(client, Command) else {}
    return twin(sent.get("model", "MODEL")) or ""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One for each tiny checkpoint that is asked; started when it is first needed."""

    class Started(dict[str, Server]):
        def __missing__(self, model: str) -> Server:
            names = {body(one).get("model", "MODEL") for one in ASKING if asked(one) == model}
            flags = ("--served-model-name", "m", *sorted(names))
            flags += FLAGS if model == LLADA2 else ()
            server = Server(ROOT / model, *flags, log=tmp_path_factory.mktemp("server") / "log")
            server.environment = environment(ROOT) | server.environment
            self[model] = stack.enter_context(server)
            return self[model]

    with ExitStack() as stack:
        yield Started()


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(one, id=str(one), marks=[] if asked(one) == LLADA2 else [pytest.mark.long])
        for one in (*ASKING, *CLIENTS)
    ],
)
def test_requests_are_answered(
    client: Command | Block, servers: dict[str, Server], tmp_path: Path
) -> None:
    server = servers[asked(client)]
    text = ADDRESS.sub(f"127.0.0.1:{server.port}", client.text)
    if isinstance(client, Block):
        (tmp_path / "client.py").write_text(text)
        text = f"python {tmp_path / 'client.py'}"
    elif client.program == "curl":
        text = f"{text} --silent --show-error --fail-with-body"
    else:
        text = filled_in(text) + ("" if ADDRESS.search(client.text) else f" --url {server.url}/v1")
    done = shell(text, ROOT)
    assert done.returncode == 0, f"{client}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    if isinstance(client, Command) and body(client):
        assert json.loads(done.stdout)["choices"][0]["finish_reason"], client
    elif isinstance(client, Command):
        check_outcome(client.words, done.stdout)
