"""What the documentation sends to its servers, sent to one server for each tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.documents.commands import Block, Command
from tests.support.documents.outcomes import check_outcome
from tests.support.documents.running import (
    ADDRESS,
    all_blocks,
    all_commands,
    asks_a_server,
    body,
    environment,
    filled_in,
    names_a_server,
    rows_for,
    shell,
)
from tests.support.documents.table import NOT_RUN, RUN_BY, twin
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LLADA2 = TINY_LLADA2.relative_to(ROOT).as_posix()
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "1024")


def is_run(found: Command | Block) -> bool:
    return not rows_for((*NOT_RUN, *RUN_BY), found)


COMMANDS = [command for command in all_commands() if is_run(command) and asks_a_server(command)]
SCRIPTS = [one for one in all_blocks("python") if is_run(one) and names_a_server(one.text)]


def asked(client: Command | Block) -> str:
    """The tiny checkpoint that a client asks: that of its JSON, else `TINY_LLADA2`'s."""
    sent = body(client) if isinstance(client, Command) else {}
    return twin(sent.get("model", "MODEL")) or ""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One for each tiny checkpoint that is asked; started when it is first needed."""

    class Started(dict[str, Server]):
        def __missing__(self, model: str) -> Server:
            names = {body(one).get("model", "MODEL") for one in COMMANDS if asked(one) == model}
            flags = (
                "--served-model-name",
                "m",
                *sorted(names),
                *(FLAGS if model == LLADA2 else ()),
            )
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
        for one in (*COMMANDS, *SCRIPTS)
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
        check_outcome(client, done.stdout)
