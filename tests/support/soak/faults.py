"""Faults beside a soak's requests: clients that break off in mid-request, and an engine that stops.

What they send is never answered, or refused; the soak's own requests must not notice them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

REQUESTS_EACH = 25  # the soak's requests for one fault
FROZEN_SECONDS = (0.5, 4.0)
HELD_SECONDS = (0.0, 6.0)  # of a request that is sent in part
HALF_SENT, GARBAGE, FROZEN = "half-sent requests", "garbage bodies", "frozen engines"
SLOW_READERS = "slow readers"  # among the soak's own requests
BODY = json.dumps({"model": "m", "prompt": "half", "max_tokens": 40, "stream": True}).encode()
GARBAGES = (b"{", b"\xff\xfe", b"null", b"[]", b'{"prompt": ', b"\x00" * 64)


@dataclass
class Faults:
    """Makes a fault for every `REQUESTS_EACH` requests of the soak.

    Attributes:
        url: of the server.
        group: its process group.
        seed: of what is drawn.
        made: faults by kind.
        wrong: what the server did that it should not.
    """

    url: str
    group: int
    seed: int = 0
    made: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"faults {self.seed}")
        self._seen = 0
        self._under_way: set[asyncio.Task[None]] = set()

    def request_ended(self) -> None:
        """One more of the soak's requests has come to its end."""
        self._seen += 1
        if self._seen % REQUESTS_EACH:
            return
        number = self._seen // REQUESTS_EACH
        # In turn, so that short runs have all of them; an engine is frozen more seldom.
        kind = FROZEN if number % 7 == 3 else (HALF_SENT, GARBAGE)[number % 2]
        if kind == FROZEN and any(task.get_name() == FROZEN for task in self._under_way):
            return
        make = {HALF_SENT: self._half_sent, GARBAGE: self._garbage, FROZEN: self._frozen}[kind]
        task = asyncio.create_task(make(), name=kind)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        self.made[kind] += 1

    async def end(self) -> None:
        """Wait for those under way."""
        await asyncio.gather(*self._under_way)

    async def _half_sent(self) -> None:
        """A client that sends part of a request, holds the connection and goes away."""
        head = self._head(len(BODY))
        whole = head + BODY
        part = whole[: self._draw.randrange(1, len(whole))]
        with contextlib.suppress(ConnectionError):
            _, writer = await self._connected()
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(self._draw.uniform(*HELD_SECONDS))
            writer.close()
            await writer.wait_closed()

    async def _garbage(self) -> None:
        """A body that is no request: refused, with a status of 400 or above and below 500."""
        body = self._draw.choice(GARBAGES)
        reader, writer = await self._connected()
        writer.write(self._head(len(body)) + body)
        line = (await reader.readline()).decode(errors="replace")
        writer.close()
        status = line.split()[1] if len(line.split()) > 1 else "nothing"
        if not status.startswith("4"):
            self.wrong.append(f"garbage {body[:20]!r} was answered with {line.strip()!r}")

    async def _frozen(self) -> None:
        """The engine stands still for a while, as on a machine that swaps."""
        pids = engines_of(self.group)
        if not pids:
            self.wrong.append("no engine was found to freeze")
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self._draw.uniform(*FROZEN_SECONDS))
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _head(self, length: int) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", f"Host: {urlsplit(self.url).netloc}")
        kind = ("Content-Type: application/json", f"Content-Length: {length}", "Connection: close")
        return "\r\n".join((*lines, *kind, "", "")).encode()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port)


def engines_of(group: int) -> list[int]:
    """Processes of a group that run an engine, by the name that vLLM gives them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = (entry / "cmdline").read_bytes()
            if b"EngineCore" in name and os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return found
