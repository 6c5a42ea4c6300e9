"""Replicas behind one another's load balancers: two "nodes" on loopback, and what is asked of them.

A node is a ``vllm serve`` of its own with a process group of its own, as on a machine of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.checkpoints import TEXT_ONLY_FLAGS, TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.server import AS_SERVED, WITHIN_ENGINE, Server
from tests.support.soak.client import Client, Outcome, send_all, session
from tests.support.soak.requests import Ask, Sending, draw_pool

START_SECONDS = 400
# Four engines on two cores, which step together, take minutes for a long answer beside 31 others.
ANSWER_SECONDS = 600.0
# Without these gloo and vLLM look for the address of this machine in its network.
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
# One request in so many has a constraint.
CONSTRAINED_EACH = 6
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS: Sequence[Mapping[str, Any]] = (
    {"structured_outputs": {"regex": "([a-z]{3}-){4}end"}},
    {"structured_outputs": {"choice": ["yes", "no", "neither of the two"]}},
    {"structured_outputs": {"json": RECORD}},
)


@dataclass(frozen=True)
class Replicated:
    """A model, how its canvases begin (`mask` or `uniform`), and flags of ``vllm serve``."""

    path: Path
    corruption: str
    flags: tuple[str, ...] = ()


MODELS = {
    "llada2": Replicated(TINY_LLADA2, "mask"),
    "gemma": Replicated(TINY_GEMMA, "uniform", TEXT_ONLY_FLAGS),
    "sdar": Replicated(TINY_SDAR, "mask"),
}


@dataclass(frozen=True)
class Layout:
    """How ranks are spread over nodes, and who chooses a rank for a request.

    Attributes:
        ranks: of all nodes together.
        first: the flags of the first node.
        second: those of the second.
        front_ends: how many of the nodes have an HTTP server.
        servers: how many processes answer HTTP on each of those nodes.
        environment: of all nodes. Where there are many ranks, an engine does without a process for
            its worker: the two wait for each other by spinning, for which there are too few cores.
    """

    ranks: int
    first: tuple[str, ...]
    second: tuple[str, ...]
    front_ends: int
    servers: int = 1
    environment: Mapping[str, str] = field(default_factory=lambda: AS_SERVED)


def _local(count: int) -> tuple[str, ...]:
    return ("--data-parallel-size-local", str(count))


LAYOUTS = {
    # The first node's server chooses among all ranks.
    "headless": Layout(
        2, _local(1), (*_local(1), "--headless", "--data-parallel-start-rank", "1"), 1
    ),
    # The same with two processes of the first node's server, each of which chooses.
    "headless, two servers": Layout(
        2, _local(1), (*_local(1), "--headless", "--data-parallel-start-rank", "1"), 1, servers=2
    ),
    # Each node's server chooses among its own two; something before them chooses a node.
    "hybrid": Layout(
        4,
        (*_local(2), "--data-parallel-hybrid-lb"),
        (*_local(2), "--data-parallel-hybrid-lb", "--data-parallel-start-rank", "2"),
        2,
        environment=WITHIN_ENGINE,
    ),
    # Each rank has a server of its own.
    "external": Layout(2, ("--data-parallel-rank", "0"), ("--data-parallel-rank", "1"), 2),
}


class Headless(Server):
    """A node without an HTTP server; it has started once the node with one has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for flag in ("--host", "--port"):
            place = self.command.index(flag)
            del self.command[place : place + 2]


@dataclass
class Replicas:
    """The nodes of a layout, running.

    Attributes:
        nodes: in the order of their ranks.
        front_ends: those with an HTTP server.
    """

    nodes: list[Server]
    front_ends: list[Server] = field(default_factory=list)

    def served(self) -> dict[int, int]:
        """Requests that ended well, by rank."""
        found: dict[int, int] = {}
        for server in self.front_ends:
            for rank, count in successes(server).items():
                found[rank] = found.get(rank, 0) + count
        return found


def successes(server: Server) -> dict[int, int]:
    """Requests that ended well, by rank, as one server counts them."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    found: dict[int, int] = {}
    for rank, count in re.findall(
        r'^vllm:request_success_total\{engine="(\d+)".* (\S+)$', text, re.M
    ):
        found[int(rank)] = found.get(int(rank), 0) + int(float(count))
    return found


@contextlib.contextmanager
def replicas(model: Replicated, layout: Layout, logs: Path, *flags: str) -> Iterator[Replicas]:
    """Start the nodes of a layout together, and end them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = (*model.flags, "--data-parallel-size", str(layout.ranks))
    common += ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port))
    nodes = []
    for number, own in enumerate((layout.first, layout.second)):
        kind = Server if number < layout.front_ends else Headless
        more = ("--api-server-count", str(layout.servers)) if kind is Server else ()
        log = logs / f"node{number}.log"
        every = (*common, *own, *more, *flags)
        environment = LOOPBACK | dict(layout.environment)
        nodes.append(
            kind(model.path, *every, log=log, env=environment, start_seconds=START_SECONDS)
        )
    running = Replicas(nodes, nodes[: layout.front_ends])
    try:
        for node in nodes:
            node.launch()
        for node in running.front_ends:
            node.wait_until_ready()
        yield running
    finally:
        # Together: a node waits for the others when it ends.
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGINT)
        for node in nodes:
            node.stop()


# ---- what is asked


def mixed(count: int, corruption: str, seed: int = 0) -> list[Sending]:
    """`count` distinct requests, every other one streamed.

    They are those of the soak, which are greedy or sampled with a seed, of every algorithm and of
    many lengths; one in `CONSTRAINED_EACH` has a constraint in the place of the algorithm's
    settings.
    """
    draw = random.Random(f"replicas {seed}")
    sendings = []
    for number, ask in enumerate(draw_pool(count, corruption, seed)):
        if number % CONSTRAINED_EACH == 0:
            body = {k: v for k, v in ask.body.items() if k not in ("vllm_xargs", "ignore_eos")}
            body |= {"max_tokens": 80} | dict(draw.choice(CONSTRAINTS))
            ask = Ask(f"{ask.name}, constrained", ask.path, body)
        sendings.append(Sending(number, ask, stream=number % 2 == 0))
    return sendings


class Spread:
    """A client of several servers, which sends requests to them in turn."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients

    async def send(self, sending: Sending) -> Outcome:
        """One request to its end."""
        return await self.clients[sending.number % len(self.clients)].send(sending)


async def ask_all(
    servers: Sequence[Server], sendings: Sequence[Sending], at_once: int
) -> list[Outcome]:
    """Send requests to servers in turn; the outcomes are in the order of the requests."""
    async with session() as opened:
        spread = Spread(
            [Client(server.url, opened, answer_seconds=ANSWER_SECONDS) for server in servers]
        )
        outcomes = await send_all(spread, sendings, at_once)
    return sorted(outcomes, key=lambda outcome: outcome.sending.number)


@dataclass(frozen=True)
class Compared:
    """How the answers of replicas compare with those of one engine.

    Attributes:
        equal: requests with the same tokens, text and finish reason.
        different: the others, in words.
    """

    equal: int
    different: list[str]


def compared(found: Sequence[Outcome], alone: Sequence[Outcome]) -> Compared:
    """Compare outcomes of the same requests, which are in the same order."""
    different = []
    for ours, theirs in zip(found, alone, strict=True):
        if theirs.answer is None or ours.answer != theirs.answer:
            said = [one.detail or str(one.answer) for one in (ours, theirs)]
            different.append(f"{ours.sending}: {said[0]} instead of {said[1]}")
    return Compared(len(found) - len(different), different)


# ---- processes


def process_named(server: Server, beginning: str) -> int:
    """The id of a process of a node's group, by the beginning of the name that vLLM gives it."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes end while we look
            name = entry.joinpath("cmdline").read_text().strip("\0")
            if name.startswith(beginning) and os.getpgid(int(entry.name)) == server.process.pid:
                return int(entry.name)
    raise AssertionError(f"no process {beginning}")


def last_line(server: Server) -> str:
    """The last line of a node's log, once all of its processes have written theirs."""
    time.sleep(1)
    return server.log.read_text().rstrip().splitlines()[-1]
