"""One run of the fuzzing: the storm, deaths in it, and what is asked afterwards."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from tests.support.fuzz.bodies import Body, plan
from tests.support.fuzz.client import GIVEN_UP, Reply, send, session
from tests.support.fuzz.endpoints import endpoints
from tests.support.fuzz.models import KNOWN, server_of
from tests.support.fuzz.rules import NAMING, SLOWEST, Finding, Site, site_of, unnamed
from tests.support.progress import Progress
from tests.support.server import Server
from tests.support.soak.models import MODELS

AT_ONCE = 16
KNOWN_EVERY = 40  # bodies between two known answers
MOST_DEATHS = 8  # of the engine; then it is given up
ALONE_SECONDS = 120.0
IDLE_SECONDS = 60.0
LOG_SECONDS = 0.1  # until the server has written its log, which comes after the answer


@dataclass
class Report:
    """What a run has seen.

    Attributes:
        model: what was served.
        counts: replies by endpoint and status.
        known: known answers that were asked for in between.
        seconds: of the storm alone.
        slowest: seconds of the slowest answer, under load.
        findings: what should not be.
        own: vLLM's own failures: where, how often, and an example.
    """

    model: str
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    known: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    own: dict[str, tuple[int, str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        statuses = sorted({status for _, status in self.counts})
        header = f"{'':34}" + "".join(f"{status:>7}" for status in statuses)
        lines = [f"{self.model}:", header]
        for name in sorted({name for name, _ in self.counts}):
            row = "".join(f"{self.counts[name, status] or '':>7}" for status in statuses)
            lines.append(f"{name:34}{row}")
        total = self.counts.total()
        lines.append(
            f"{total} bodies in {self.seconds:.0f} s, {self.known} known answers in between; the "
            f"slowest answer took {self.slowest:.1f} s under load"
        )
        for where, (count, example) in sorted(self.own.items()):
            lines.append(f"vLLM's own, {count} times: {where}\n    {example[:300]}")
        lines += [line for finding in self.findings for line in finding.lines()]
        return [*lines, f"{len(self.findings)} findings" if self.findings else "nothing found"]

    def figures(self) -> dict[str, Any]:
        """For a results file."""
        by_status: Counter[str] = Counter()
        for (_, status), count in self.counts.items():
            by_status[str(status)] += count
        return {
            "bodies": self.counts.total(),
            "statuses": dict(sorted(by_status.items())),
            "known_answers": self.known,
            "seconds": round(self.seconds, 1),
            "slowest_seconds": round(self.slowest, 1),
            "findings": ["\n".join(finding.lines()) for finding in self.findings],
            "vllms_own": {where: count for where, (count, _) in sorted(self.own.items())},
        }


class Fuzzer:
    """One model's run: its server, which may have to be started again, and what was seen."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.report = Report(name)
        self.corruption = MODELS[name].corruption
        self.server = server_of(name, scratch / f"{name}.log")
        self.known: list[tuple[Mapping[str, Any], Any]] = []
        self.failed: list[Reply] = []
        self.late: list[Reply] = []
        self.unnamed: list[Reply] = []
        self.sites: dict[Reply, Site | None] = {}
        self.recent: deque[Reply] = deque(maxlen=4 * AT_ONCE)
        self.under_way: dict[int, Body] = {}
        self.deaths = 0

    def run(self, count: int, seed: int) -> Report:
        """All of it; the server is gone afterwards."""
        try:
            with self.server:
                document = httpx.get(f"{self.server.url}/openapi.json", timeout=30).json()
                bodies = plan(endpoints(document, self.corruption), count, seed)
                asyncio.run(self.fuzz(bodies))
        finally:
            self.server.stop()
        return self.report

    async def fuzz(self, bodies: Sequence[Body]) -> None:
        async with session() as opened:
            self.known = [(ask, await self.answer(opened, ask)) for ask in KNOWN]
            begin = time.monotonic()
            waiting = list(bodies)
            progress = Progress(f"{self.report.model}", len(waiting))
            while waiting and self.deaths < MOST_DEATHS:
                waiting = await self.storm(opened, waiting, progress)
                if waiting or not self.alive():
                    waiting = await self.after_death(opened, waiting)
            self.report.seconds = time.monotonic() - begin
            if waiting:
                self.find(f"given up after {MOST_DEATHS} deaths, {len(waiting)} bodies unsent")
            if self.alive():
                await self.in_peace(opened)

    # ---- the storm

    async def storm(
        self, opened: aiohttp.ClientSession, bodies: Sequence[Body], progress: Progress
    ) -> list[Body]:
        """Send bodies until there are none, or the engine is dead; what was not answered."""
        queue = deque(bodies)
        dead = asyncio.Event()

        async def worker() -> None:
            while queue and not dead.is_set():
                body = queue.popleft()
                self.under_way[body.number] = body
                reply = await send(opened, self.server.url, body)
                if reply.failed and not await self.healthy(opened):
                    dead.set()
                    return  # and the body stays under way
                self.under_way.pop(body.number)
                self.count(reply)
                progress.step()
                if not body.number % KNOWN_EVERY and not await self.as_known(opened, body.number):
                    dead.set()

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        return list(queue)

    def count(self, reply: Reply) -> None:
        self.report.counts[str(reply.body.endpoint), reply.status] += 1
        self.recent.append(reply)
        if reply.failed:
            self.failed.append(reply)
        if reply.body.endpoint.path in NAMING and unnamed(reply):
            self.unnamed.append(reply)
        if reply.status == GIVEN_UP or reply.seconds > SLOWEST:
            self.late.append(reply)
        self.report.slowest = max(self.report.slowest, reply.seconds)

    async def as_known(self, opened: aiohttp.ClientSession, number: int) -> bool:
        """Whether the server answers what it answered before the storm; False when it is dead."""
        ask, wanted = self.known[number // KNOWN_EVERY % len(self.known)]
        got = await self.answer(opened, ask)
        if got is None and not await self.healthy(opened):
            return False
        self.report.known += 1
        if got != wanted:
            self.find(f"a known answer changed: {dict(ask)}: {got} is not {wanted}")
        return True

    async def answer(self, opened: aiohttp.ClientSession, ask: Mapping[str, Any]) -> Any:
        """Token ids of a completion, or None where there is none."""
        url = f"{self.server.url}/v1/completions"
        try:
            async with opened.post(url, json=dict(ask)) as response:
                if response.status == 200:
                    return [choice["token_ids"] for choice in (await response.json())["choices"]]
        except aiohttp.ClientError:
            pass
        return None

    async def healthy(self, opened: aiohttp.ClientSession) -> bool:
        try:
            async with opened.get(f"{self.server.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    def alive(self) -> bool:
        try:
            return httpx.get(f"{self.server.url}/health", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    def find(self, what: str, reply: Reply | None = None, site: Site | None = None) -> None:
        self.report.findings.append(Finding(what, reply, site))
        print("\n".join(self.report.findings[-1].lines()), file=sys.stderr, flush=True)

    # ---- a dead engine

    async def after_death(
        self, opened: aiohttp.ClientSession, waiting: Sequence[Body]
    ) -> list[Body]:
        """Start again, ask alone what was under way, and name what kills; what is left to send."""
        self.deaths += 1
        site = site_of(self.server.log.read_text(errors="replace"))
        suspects = {**{r.body.number: r.body for r in self.recent}, **self.under_way}
        # What was under way comes first, then what ended last.
        ordered = [*self.under_way.values(), *(r.body for r in reversed(self.recent))]
        again = list(self.under_way.values())
        self.under_way.clear()
        self.recent.clear()
        self.restart()
        for body in dict.fromkeys(ordered):
            reply = await send(opened, self.server.url, body)
            if body in again:
                self.count(reply)
            await asyncio.sleep(0.05)
            lives = await self.healthy(opened)
            if not lives or await self.answer(opened, self.known[0][0]) is None:
                site = site_of(self.server.log.read_text(errors="replace"))
                self.find("the engine dies of one request", reply, site)
                self.restart()
                return [one for one in again if one != body and one not in self.answered()] + list(
                    waiting
                )
        named = ", ".join(str(body)[:200] for body in suspects.values())
        self.find(f"the engine died, of none of these alone: {named}", None, site)
        return list(waiting)

    def answered(self) -> set[Body]:
        return {reply.body for reply in self.recent}

    def restart(self) -> None:
        self.server.stop()
        log = self.server.log.with_suffix(f".{time.monotonic():.0f}.log")
        self.server = server_of(self.report.model, log)
        self.server.__enter__()

    # ---- afterwards

    async def in_peace(self, opened: aiohttp.ClientSession) -> None:
        """What was slow, asked again; what failed, with the log; and whether nothing is held."""
        for number in range(len(self.known)):
            await self.as_known(opened, number * KNOWN_EVERY)
        try:
            self.server.wait_until_idle(IDLE_SECONDS)
        except AssertionError as error:
            self.find(f"not idle after {IDLE_SECONDS:.0f} s: {error}")
        for reply in self.late:
            alone = await send(opened, self.server.url, reply.body, ALONE_SECONDS)
            if alone.status == GIVEN_UP or alone.seconds > SLOWEST:
                self.find(f"more than {SLOWEST:.0f} s alone", alone)
        for reply in self.failed:
            _, self.sites[reply] = await traced(opened, self.server, reply.body)


async def traced(
    opened: aiohttp.ClientSession, server: Server, body: Body
) -> tuple[Reply, Site | None]:
    """The answer to a body that is asked alone, and where it failed by the server's log."""
    before = server.log.stat().st_size
    reply = await send(opened, server.url, body)
    await asyncio.sleep(LOG_SECONDS)
    with server.log.open("rb") as log:
        log.seek(before)
        return reply, site_of(log.read().decode(errors="replace"))
