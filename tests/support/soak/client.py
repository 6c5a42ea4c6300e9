"""A client that sends many requests at a time, and goes away from some of them."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.soak.requests import Sending

# Seconds, far beyond what any answer takes: a request that is not answered by then hangs.
ANSWER_SECONDS = 120.0
# So many failures say enough; where they are hangs, waiting for more would take hours.
MOST_FAILURES = 10
COMPLETED, ABORTED, REFUSED, FAILED = "completed", "aborted", "refused", "failed"


@dataclass(frozen=True)
class Answer:
    """What came back, of all choices: token ids, text and reasoning, and why they ended."""

    tokens: tuple[int, ...]
    text: str
    reason: str | None


@dataclass(frozen=True)
class Outcome:
    """What became of a request: completed, aborted by the client, refused rightly, or failed.

    A completed one has an answer, and a failed one says what went wrong.
    """

    sending: Sending
    status: str
    answer: Answer | None = None
    detail: str = ""


class RefusalError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text[:500]}")
        self.status, self.text = status, text


@dataclass
class Client:
    """Sends requests to the server at `url`, and remembers the `latencies` of its answers.

    A connection is used once: the server closes idle ones, maybe while a request is sent. A
    request that is not answered in `answer_seconds` hangs.
    """

    url: str
    session: aiohttp.ClientSession
    latencies: list[float] = field(default_factory=list)
    answer_seconds: float = ANSWER_SECONDS

    async def send(self, sending: Sending) -> Outcome:
        """One request to its end, or to the moment when the client leaves. Never raises."""
        begin = time.monotonic()
        leaves = sending.leaves
        patience = self.answer_seconds if leaves is None else leaves * self.typical()
        answer, status, detail = None, FAILED, ""
        try:
            answer = await asyncio.wait_for(self._ask(sending), patience)
            status = FAILED if sending.ask.wrong else COMPLETED
            detail = "was answered, not refused" if sending.ask.wrong else ""
        except RefusalError as refusal:
            expected = 400 <= refusal.status < 500 and (sending.ask.wrong or "\0") in refusal.text
            status, detail = (REFUSED, "") if expected else (FAILED, str(refusal))
        except TimeoutError:
            if leaves is not None:
                status = ABORTED
            else:
                detail = f"hangs: no answer in {self.answer_seconds:.0f} s"
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            detail = f"{type(error).__name__}: {error}"
        if status == COMPLETED:
            self.latencies.append(time.monotonic() - begin)
        return Outcome(sending, status, answer, detail)

    def typical(self) -> float:
        """Median seconds of the last answers; a second before there are any."""
        return statistics.median(self.latencies[-100:]) if self.latencies else 1.0

    async def _ask(self, sending: Sending) -> Answer:
        body = {"model": "m", "return_token_ids": True, "stream": sending.stream}
        url = self.url + sending.ask.path
        async with self.session.post(url, json=body | dict(sending.ask.body)) as response:
            if response.status != 200:
                raise RefusalError(response.status, await response.text())
            if sending.stream:
                return joined([event async for event in _events(response.content)])
            return joined([await response.json()])


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. A refusal may come as one, with a status of 200."""
    ended = False
    async for line in content:
        data = line.decode().removeprefix("data: ").strip()
        ended = ended or data == "[DONE]"
        if not data or ended:
            continue
        event = json.loads(data)
        if "error" in event:
            raise RefusalError(event["error"]["code"], data)
        yield event
    if not ended:
        raise ValueError("the stream ended without [DONE]")


def joined(parts: Iterable[dict[str, Any]]) -> Answer:
    """The answer of a whole response, or of a stream's events; several choices in their order."""
    tokens: dict[int, list[int]] = {}
    texts: dict[tuple[int, str], str] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        index = choice["index"]
        tokens.setdefault(index, []).extend(choice.get("token_ids") or [])
        said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        for kind in ("reasoning", "content"):
            texts[index, kind] = texts.get((index, kind), "") + (said.get(kind) or "")
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    return Answer(
        tuple(token for index in sorted(tokens) for token in tokens[index]),
        "|".join(texts[key] for key in sorted(texts)),
        ",".join(reasons[index] for index in sorted(reasons)) or None,
    )


def session() -> aiohttp.ClientSession:
    """Connections without limit, each for one request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20)


async def send_all(
    client: Client,
    plan: Iterable[Sending],
    at_once: int,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send a plan, `at_once` requests at a time; `finished` hears of each when it has ended.

    Stops sending after `MOST_FAILURES` failures.
    """
    waiting, outcomes = iter(plan), list[Outcome]()

    async def worker() -> None:
        for sending in waiting:
            if sum(outcome.status == FAILED for outcome in outcomes) >= MOST_FAILURES:
                return
            outcome = await client.send(sending)
            outcomes.append(outcome)
            finished(outcome)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return outcomes
