"""One run of the fuzzing: a server, the storm of bodies, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.support.fuzz.bodies import Body
from tests.support.server import Server
from tests.support.soak.client import session
from tests.support.soak.models import MODELS, adapter_flags, chosen, frontend_flags

AT_ONCE = 16
KNOWN_EVERY = 40  # bodies between two known answers
# Seconds; beyond them a request is given up, and asked again alone, when it may take `SLOWEST`.
PATIENCE, SLOWEST = 60.0, 40.0
IDLE_SECONDS = 60.0
LOG_SECONDS = 0.1  # until the server has written its log, which comes after the answer
MOST_SHOWN = 4000  # characters of an answer that are kept
BROKEN, GIVEN_UP = 599, 598  # instead of a status
# Kinds of errors inside of a stream that have no status.
OF_THE_CLIENT = re.compile("invalid|bad_?request|not_?found|validation", re.IGNORECASE)
# Everything that opens an endpoint, or more of one.
OPEN = (
    *("--enable-scale-out", "--enable-prompt-tokens-details", "--trust-request-chat-template"),
    *("--enable-server-load-tracking", "--enable-force-include-usage", "--log-error-stack"),
)
# Answers that can be asked for later, and made meanwhile.
ENVIRONMENT = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
AB = {"regex": "[ab]+"}
KNOWN: Sequence[Mapping[str, Any]] = tuple(
    {"model": "m", "return_token_ids": True, "max_tokens": 40, "ignore_eos": True} | one
    for one in (
        {"prompt": "sort 61 35 88 14", "temperature": 0, "seed": 7},
        {"prompt": "count from 12 to 16", "temperature": 0.9, "seed": 11, "top_p": 0.9, "n": 2},
        {"prompt": "copy ab", "temperature": 0, "seed": 3, "structured_outputs": AB},
    )
)


@dataclass(frozen=True)
class Reply:
    """What came back for a body.

    The status is that of HTTP, or of an error inside a stream; `BROKEN` where the connection broke
    off, and `GIVEN_UP` where nothing had come by then.
    """

    body: Body
    status: int
    text: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether the server failed: not what it says it has not (501), nor that it is busy."""
        return self.status >= 500 and self.status not in (501, 503, GIVEN_UP)

    def __str__(self) -> str:
        return f"{self.status} after {self.seconds:.1f} s: {self.text[:300]} for {self.body}"


async def send(opened: aiohttp.ClientSession, url: str, body: Body) -> Reply:
    """One body to the end of its answer. Never raises."""
    begin = time.monotonic()
    try:
        status, text = await asyncio.wait_for(_ask(opened, url, body), PATIENCE)
    except TimeoutError:
        status, text = GIVEN_UP, f"no answer in {PATIENCE:.0f} s"
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
        status, text = BROKEN, f"{type(error).__name__}: {error}"
    return Reply(body, status, text[:MOST_SHOWN], time.monotonic() - begin)


async def _ask(opened: aiohttp.ClientSession, url: str, body: Body) -> tuple[int, str]:
    headers = {"Content-Type": body.kind} if body.kind else {}
    automatic = ["Content-Type"]
    async with opened.post(
        url + body.path, data=body.content, headers=headers, skip_auto_headers=automatic
    ) as answer:
        text = (await answer.read()).decode(errors="replace")
        if answer.status == 200 and answer.content_type == "text/event-stream":
            return error_in(text) or (200, text)
        return answer.status, text


def error_in(stream: str) -> tuple[int, str] | None:
    """The error that a stream of events ends with, as a status and its event."""
    for data in re.findall(r'^data: *(\{.*"error".*)$', stream, re.MULTILINE):
        with contextlib.suppress(ValueError):
            error = json.loads(data).get("error")
            if isinstance(error, dict):
                code = error.get("code")
                if not isinstance(code, int):
                    code = 400 if OF_THE_CLIENT.search(str(error.get("type"))) else 500
                return code, data
    return None


# ---- refusals name what they refuse

# What vLLM reads before anything else, and may refuse without its name.
READ_FIRST = frozenset({"messages", "prompt", "input", "token_ids", "tools"})
# Whose refusals have to name something.
NAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
# What vLLM calls a field otherwise.
CALLED: Mapping[frozenset[str], set[str]] = {
    frozenset({"vllm_xargs"}): {"extra_args", "diffusion"},
    frozenset({"response_format", "structured_outputs", "text"}): {"structured"},
    frozenset({"max_completion_tokens", "max_output_tokens"}): {"max_tokens"},
    frozenset({"previous_response_id"}): {"response_id"},
}


def unnamed(reply: Reply) -> bool:
    """Whether a refusal names nothing of what was given beside the prompt."""
    if reply.body.path not in NAMING:
        return False
    given = {part for name in reply.body.names for part in name.split(".")}
    if reply.body.how not in ("random", "contradiction") or given & READ_FIRST:
        return False
    known = given | {"context length"}
    for words, said in CALLED.items():
        if given & words:
            known |= said
    return 400 <= reply.status < 500 and not any(name in reply.text for name in known)


# ---- failures, by the server's log

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
RAISED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Warning)\b.*$|^[A-Z]\w+Error: .*$")
HEADER = re.compile(r"^\([^)]* pid=\d+\) (?:[A-Z]+ \S+ \S+ \[[^\]]+\] ?)?")
PACKAGES = re.compile(r"/(vllm|vllm_dllm)/")
TRACEBACK = "Traceback (most recent call last):"
CAUSE = "The above exception was the direct cause of the following exception"
DEAD = re.compile(
    r"^(\([^)]*\) )?(.*\] )?vllm\.v1\.engine\.exceptions\.EngineDeadError", re.MULTILINE
)
# Where vLLM itself answers 500, by file and function; the lines are those of vLLM 0.32.
VLLMS_OWN: Mapping[tuple[str, str], str] = {
    ("vllm/entrypoints/openai/completion/protocol.py", "<genexpr>"): (
        "line 487: `structured_outputs` that is no object"
    ),
    ("vllm/entrypoints/openai/chat_completion/protocol.py", "<genexpr>"): (
        "line 911: `structured_outputs` that is no object"
    ),
    ("vllm/v1/engine/output_processor.py", "from_new_request"): (
        "line 246: `kv_transfer_params` in `vllm_xargs` that is no object"
    ),
    ("vllm/entrypoints/serve/exception_handling/handlers/vllm_error.py", "engine_error_handler"): (
        "line 54: a `request_id` that holds half of a surrogate pair"
    ),
    ("vllm/v1/serial_utils.py", "encode"): (
        "line 170: a `request_id` or `session_id` that holds half of a surrogate pair"
    ),
    ("vllm/sampling_params.py", "_validate_trace_replay"): (
        "line 1106: `trace_decode_token_ids`, which vLLM checks behind its own checks"
    ),
}


class Site(NamedTuple):
    """Where an exception was raised, or where vLLM or this package called what raised it."""

    file: str
    function: str
    text: str


def site_of(log: str) -> Site | None:
    """The innermost frame in vLLM or here of a log's last traceback, but for `DEAD` ones."""
    parts = [part for part in log.split(TRACEBACK)[1:] if not DEAD.search(part)]
    while len(parts) > 1 and CAUSE in parts[-2]:
        parts.pop()
    lines = [HEADER.sub("", line) for part in parts[-1:] for line in part.splitlines()]
    frames = [(n, found) for n, line in enumerate(lines) if (found := FRAME.search(line))]
    if not frames:
        return None
    inner = [found for _, found in frames if PACKAGES.search(found["file"])] or [frames[-1][1]]
    file, line, function = inner[-1].groups()
    if named := PACKAGES.search(file):
        file = file[named.start() + 1 :]
    after = (line.strip() for line in lines[frames[-1][0] + 1 :])
    error = next((line for line in after if RAISED.match(line)), "")
    return Site(file, function, f"{file}:{line} {function}: {error[:200]}")


class Fuzzer:
    """One model's server, and what was seen of it.

    Attributes:
        counts: replies by endpoint and status.
        checked: how many known answers were asked for, most of them in the storm.
        seconds: that the storm took, and `slowest` its slowest answer.
        findings: what should not be, in words.
        unnamed: refusals that name nothing of what was given.
        own: vLLM's own failures: where, and how often.
    """

    def __init__(self, name: str, scratch: Path) -> None:
        model = chosen(name)
        self.name, self.corruption = name, MODELS[name].corruption
        flags = (*OPEN, *frontend_flags(model.reasoning), *model.flags)
        beside = adapter_flags(model.path, model.adapters[:1], scratch)
        log = scratch / f"{name}.log"
        self.server = Server(model.path, *flags, *beside, log=log, env=ENVIRONMENT)
        self.counts: Counter[tuple[str, int]] = Counter()
        self.own: Counter[str] = Counter()
        self.checked, self.seconds, self.slowest = 0, 0.0, 0.0
        self.findings: list[str] = []
        self.unnamed: list[Reply] = []
        self.failed: list[Reply] = []
        self.late: list[Reply] = []

    async def storm(self, bodies: Sequence[Body]) -> None:
        """Send the bodies, many at a time, until the engine dies; then ask what must still hold."""
        async with session() as opened:
            self.opened = opened
            self.known = [await self.answer(ask) for ask in KNOWN]
            waiting, under_way, begin = iter(bodies), set[Body](), time.monotonic()

            async def worker() -> None:
                for body in waiting:
                    under_way.add(body)
                    reply = await send(opened, self.server.url, body)
                    if reply.failed and not await self.healthy():
                        return
                    under_way.remove(body)
                    self.count(reply)
                    if not body.number % KNOWN_EVERY:
                        await self.check_known(body.number // KNOWN_EVERY)

            await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
            self.seconds = time.monotonic() - begin
            if await self.healthy():
                await self.in_peace()
            else:
                site = site_of(self.server.log.read_text(errors="replace"))
                suspects = "\n  ".join(map(str, under_way))
                self.findings.append(
                    f"the engine died ({site and site.text}) beside these:\n  {suspects}"
                )

    def count(self, reply: Reply) -> None:
        self.counts[reply.body.path, reply.status] += 1
        if reply.failed:
            self.failed.append(reply)
        if unnamed(reply):
            self.unnamed.append(reply)
        if reply.status == GIVEN_UP or reply.seconds > SLOWEST:
            self.late.append(reply)
        self.slowest = max(self.slowest, reply.seconds)

    async def check_known(self, number: int) -> None:
        """The server answers what it answered before the storm."""
        number %= len(KNOWN)
        got, wanted = await self.answer(KNOWN[number]), self.known[number]
        self.checked += 1
        if got != wanted:
            self.findings.append(f"an answer changed: {KNOWN[number]}: {got} is not {wanted}")

    async def answer(self, ask: Mapping[str, Any]) -> Any:
        url = f"{self.server.url}/v1/completions"
        with contextlib.suppress(aiohttp.ClientError):
            async with self.opened.post(url, json=dict(ask)) as response:
                if response.status == 200:
                    return [choice["token_ids"] for choice in (await response.json())["choices"]]
        return None

    async def healthy(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with self.opened.get(f"{self.server.url}/health") as response:
                return response.status == 200
        return False

    async def in_peace(self) -> None:
        """What was slow, asked again; what failed, with the log; and whether nothing is held."""
        for number in range(len(KNOWN)):
            await self.check_known(number)
        try:
            self.server.wait_until_idle(IDLE_SECONDS)
        except AssertionError as error:
            self.findings.append(f"not idle after {IDLE_SECONDS:.0f} s: {error}")
        for reply in self.late:
            alone = await send(self.opened, self.server.url, reply.body)
            if alone.status == GIVEN_UP or alone.seconds > SLOWEST:
                self.findings.append(f"more than {SLOWEST:.0f} s alone: {alone}")
        for reply in self.failed:
            before = self.server.log.stat().st_size
            await send(self.opened, self.server.url, reply.body)
            await asyncio.sleep(LOG_SECONDS)
            site = site_of(self.server.log.read_bytes()[before:].decode(errors="replace"))
            if site is not None and site[:2] in VLLMS_OWN:
                self.own[site.text] += 1
            else:
                self.findings.append(f"{reply}\n  raised at {site and site.text}")

    def figures(self) -> dict[str, Any]:
        statuses: dict[str, dict[str, int]] = {}
        for (path, status), count in sorted(self.counts.items()):
            statuses.setdefault(path, {})[str(status)] = count
        return {
            "bodies": self.counts.total(),
            "statuses": statuses,
            "known_answers": self.checked,
            "seconds": round(self.seconds, 1),
            "slowest_seconds": round(self.slowest, 1),
            "findings": self.findings,
            "vllms_own": dict(sorted(self.own.items())),
        }
