"""One run of the fuzzing: its servers, the storm, deaths in it, and what is asked afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from tests.support.checkpoints import TINY_LLADA2
from tests.support.fuzz.bodies import Body, plan
from tests.support.fuzz.client import GIVEN_UP, Reply, send, session
from tests.support.fuzz.endpoints import endpoints
from tests.support.fuzz.rules import NAMING, SLOWEST, Finding, Site, site_of, unnamed
from tests.support.server import Server
from tests.support.soak.models import MODELS, adapter_flags, chosen, frontend_flags
from tests.support.tiny_llama import write_tiny_llama

AT_ONCE = 16
KNOWN_EVERY = 40  # bodies between two known answers
MOST_DEATHS = 8  # of the engine; then it is given up
ALONE_SECONDS = 120.0
IDLE_SECONDS = 60.0
LOG_SECONDS = 0.1  # until the server has written its log, which comes after the answer
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # endpoints of development
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # answers that can be asked for later
}
# Everything that opens an endpoint, or more of one.
OPEN = (
    *("--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-prompt-tokens-details"),
    *("--trust-request-chat-template",),
    *("--enable-server-load-tracking", "--enable-force-include-usage"),
    "--log-error-stack",
)
AB = {"regex": "[ab]+"}
KNOWN: Sequence[Mapping[str, Any]] = tuple(
    {"model": "m", "return_token_ids": True, "max_tokens": 40, "ignore_eos": True} | one
    for one in (
        {"prompt": "sort 61 35 88 14", "temperature": 0, "seed": 7},
        {"prompt": "count from 12 to 16", "temperature": 0.9, "seed": 11, "top_p": 0.9, "n": 2},
        {"prompt": "copy ab", "temperature": 0, "seed": 3, "structured_outputs": AB},
    )
)


def server_of(name: str, log: Path) -> Server:
    model = chosen(name)
    adapters = model.adapters[:1]
    flags = (*OPEN, *frontend_flags(model.reasoning), *model.flags)
    beside = adapter_flags(model.path, adapters, log.parent)
    return Server(model.path, *flags, *beside, log=log, env=ENVIRONMENT)


def plain_server(scratch: Path) -> Server:
    """Stock vLLM without plugins, serving an ordinary causal model with the same tokenizer."""
    model = scratch / "plain"
    if not (model / "model.safetensors").exists():
        write_tiny_llama(model, 272, 2048, bos_token_id=256, eos_token_id=257)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(TINY_LLADA2 / name, model / name)
    environment = ENVIRONMENT | {"VLLM_PLUGINS": ""}
    flags = (*OPEN, *frontend_flags("granite"))
    return Server(model, *flags, log=scratch / "plain.log", env=environment)


@dataclass
class Report:
    """What a run has seen.

    `counts` has replies by endpoint and status, `known` the number of known answers in between,
    and `own` vLLM's own failures: where, how often, and an example. The storm took `seconds`.
    """

    model: str
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    known: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    own: dict[str, tuple[int, str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
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
        self.under_way: dict[int, Body] = {}
        self.deaths = 0

    def run(self, count: int, seed: int) -> Report:
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
            while waiting and self.deaths < MOST_DEATHS:
                print(f"{self.report.model}: {len(waiting)} bodies", flush=True)
                waiting = await self.storm(opened, waiting)
                if self.under_way:
                    waiting = [*await self.after_death(opened), *waiting]
            self.report.seconds = time.monotonic() - begin
            if waiting:
                self.find(f"given up after {MOST_DEATHS} deaths, {len(waiting)} bodies unsent")
            if await self.healthy(opened):
                await self.in_peace(opened)
            else:
                self.find("the server is not healthy after the last body")

    async def storm(self, opened: aiohttp.ClientSession, bodies: Sequence[Body]) -> list[Body]:
        """Send bodies until there are none, or the engine is dead; what is left to send.

        What was sent to a dead engine, and may have killed it, is then under way.
        """
        queue = deque(bodies)
        dead = asyncio.Event()

        async def worker() -> None:
            while queue and not dead.is_set():
                body = queue.popleft()
                self.under_way[body.number] = body
                reply = await send(opened, self.server.url, body)
                asked = not body.number % KNOWN_EVERY
                if (reply.failed and not await self.healthy(opened)) or (
                    asked and not await self.as_known(opened, body.number)
                ):
                    dead.set()
                    return
                self.under_way.pop(body.number)
                self.count(reply)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        return list(queue)

    def count(self, reply: Reply) -> None:
        self.report.counts[str(reply.body.endpoint), reply.status] += 1
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
        url = f"{self.server.url}/v1/completions"
        with contextlib.suppress(aiohttp.ClientError):
            async with opened.post(url, json=dict(ask)) as response:
                if response.status == 200:
                    return [choice["token_ids"] for choice in (await response.json())["choices"]]
        return None

    async def healthy(self, opened: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with opened.get(f"{self.server.url}/health") as response:
                return response.status == 200
        return False

    def find(self, what: str, reply: Reply | None = None, site: Site | None = None) -> None:
        self.report.findings.append(Finding(what, reply, site))
        print("\n".join(self.report.findings[-1].lines()), file=sys.stderr, flush=True)

    async def after_death(self, opened: aiohttp.ClientSession) -> list[Body]:
        """Start again, ask alone what was under way, and name what kills; what is left of it."""
        self.deaths += 1
        suspects = list(self.under_way.values())
        self.under_way.clear()
        site = site_of(self.server.log.read_text(errors="replace"))
        self.restart()
        for number, body in enumerate(suspects, start=1):
            reply = await send(opened, self.server.url, body)
            self.count(reply)
            await asyncio.sleep(LOG_SECONDS)
            if await self.answer(opened, self.known[0][0]) is None:
                site = site_of(self.server.log.read_text(errors="replace"))
                self.find("the engine dies of one request", reply, site)
                self.restart()
                return suspects[number:]
        named = ", ".join(str(body)[:200] for body in suspects)
        self.find(f"the engine died, of none of these alone: {named}", None, site)
        return []

    def restart(self) -> None:
        self.server.stop()
        log = self.server.log.with_suffix(f".{time.monotonic():.0f}.log")
        self.server = server_of(self.report.model, log)
        self.server.__enter__()

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
