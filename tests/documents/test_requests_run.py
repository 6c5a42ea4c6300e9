"""The documentation's servers, and what it sends to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.documents.test_commands_run import check_outcome
from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.documents.commands import Block, Command
from tests.support.documents.running import (
    ADDRESS,
    all_blocks,
    asks_a_server,
    body,
    environment,
    filled_in,
    model_of,
    names_a_server,
    rows_for,
    shell,
    to_run,
)
from tests.support.documents.table import NOT_RUN, RUN_BY, twin
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LLADA2 = TINY_LLADA2.relative_to(ROOT).as_posix()
# What any page may need; a server of the documentation has its own flags.
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "1024")
SERVERS = [command for command in to_run() if command.program == "vllm serve"]
CLIENTS: list[Command | Block] = [command for command in to_run() if asks_a_server(command)]
CLIENTS += [
    block
    for block in all_blocks("python")
    if names_a_server(block.text) and not rows_for((*NOT_RUN, *RUN_BY), block)
]


def asked(client: Command | Block) -> str:
    return model_of(client) if isinstance(client, Command) else LLADA2


def names(model: str) -> tuple[str, ...]:
    """The names by which the documentation asks a tiny checkpoint."""
    sent = {body(one).get("model", "MODEL") for one in CLIENTS if isinstance(one, Command)}
    return ("--served-model-name", "m", *sorted(name for name in sent if twin(name) == model))


def start(stack: ExitStack, model: str, scratch: Path, *flags: str) -> Server:
    """A running server, in a folder and with variables as the documentation's commands have."""
    server = Server(ROOT / model, *names(model), *flags, log=scratch / "log")
    server.environment = environment(ROOT) | server.environment
    return stack.enter_context(server)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One for each tiny checkpoint that is asked; started when it is first needed."""

    class Started(dict[str, Server]):
        def __missing__(self, model: str) -> Server:
            flags = FLAGS if model == LLADA2 else ()
            self[model] = start(stack, model, tmp_path_factory.mktemp("server"), *flags)
            return self[model]

    with ExitStack() as stack:
        yield Started()


def send(client: Command | Block, server: Server, scratch: Path) -> None:
    """Run what asks a server; it must succeed, and an answer must be one."""
    text = ADDRESS.sub(f"127.0.0.1:{server.port}", client.text)
    if isinstance(client, Block):
        (scratch / "client.py").write_text(text)
        done = shell(f"python {scratch / 'client.py'}", ROOT)
    elif client.program == "curl":
        done = shell(f"{text} --silent --show-error --fail-with-body", ROOT)
    else:
        url = "" if ADDRESS.search(client.text) else f" --url {server.url}/v1"
        done = shell(f"{filled_in(text)}{url}", ROOT)
    assert done.returncode == 0, f"{client}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    if isinstance(client, Command) and body(client):
        assert json.loads(done.stdout)["choices"][0]["finish_reason"], client
    elif isinstance(client, Command):
        check_outcome(client, done.stdout)


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(one, id=str(one), marks=[] if asked(one) == LLADA2 else [pytest.mark.long])
        for one in CLIENTS
    ],
)
def test_requests_are_answered(
    client: Command | Block, servers: dict[str, Server], tmp_path: Path
) -> None:
    send(client, servers[asked(client)], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("command", SERVERS, ids=str)
def test_servers_answer(command: Command, tmp_path: Path) -> None:
    """Each with its flags, and those clients of its page that follow it."""
    name, *flags = command.words[2:]
    model = twin(name) or name
    later = [server.line for server in SERVERS if server.page == command.page]
    end = min((line for line in later if line > command.line), default=1 << 30)
    with ExitStack() as stack:
        server = start(stack, model, tmp_path, *map(filled_in, flags))
        answer = server.post("/v1/completions", prompt="64 + 28", max_tokens=8)
        assert answer.status_code == 200, answer.text
        for client in CLIENTS:
            follows = client.page == command.page and command.line < client.line < end
            if follows and asked(client) == model:
                send(client, server, tmp_path)
