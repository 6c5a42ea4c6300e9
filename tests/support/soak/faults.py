"""A fault beside a soak's requests, which must not notice it: an engine that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

REQUESTS_EACH = 150  # the soak's requests for one fault
FROZEN_SECONDS = (0.5, 4.0)
# What a report calls them; slow readers are among the soak's own requests.
FROZEN, SLOW_READERS = "frozen engines", "slow readers"


@dataclass
class Faults:
    """Freezes the engine, as on a machine that swaps, for every `REQUESTS_EACH` requests.

    Attributes:
        group: the server's process group.
        seed: of what is drawn.
        made: faults so far.
        wrong: what the server did that it should not.
    """

    group: int
    seed: int = 0
    made: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"faults {self.seed}")
        self._seen = 0
        self._under_way: set[asyncio.Task[None]] = set()

    def request_ended(self) -> None:
        """One more of the soak's requests has come to its end."""
        self._seen += 1
        if self._seen % REQUESTS_EACH == 0 and not self._under_way:
            task = asyncio.create_task(self._freeze())
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            self.made += 1

    async def end(self) -> None:
        """Wait for those under way."""
        await asyncio.gather(*self._under_way)

    async def _freeze(self) -> None:
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


def engines_of(group: int) -> list[int]:
    """Processes of a group that run an engine, by the name that vLLM gives them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = (entry / "cmdline").read_bytes()
            if b"EngineCore" in name and os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return found
