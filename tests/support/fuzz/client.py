"""Sends bodies as they are, and says what came back: a status, words, how long it took."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass

import aiohttp
from yarl import URL

from tests.support.fuzz.bodies import Body
from tests.support.soak.client import session as session

# Seconds; beyond them a request is given up, and asked again alone.
PATIENCE = 60.0
MOST_SHOWN = 4000  # characters of an answer that are kept
BROKEN, GIVEN_UP = 599, 598  # instead of a status
# Kinds of errors inside of a stream that have no status.
OF_THE_CLIENT = re.compile("invalid|bad_?request|not_?found|validation", re.IGNORECASE)


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


async def send(
    opened: aiohttp.ClientSession, url: str, body: Body, patience: float = PATIENCE
) -> Reply:
    """One body to the end of its answer. Never raises."""
    begin = time.monotonic()
    try:
        status, text = await asyncio.wait_for(_ask(opened, url, body), patience)
    except TimeoutError:
        status, text = GIVEN_UP, f"no answer in {patience:.0f} s"
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
        status, text = BROKEN, f"{type(error).__name__}: {error}"
    return Reply(body, status, text[:MOST_SHOWN], time.monotonic() - begin)


async def _ask(opened: aiohttp.ClientSession, url: str, body: Body) -> tuple[int, str]:
    headers = {"Content-Type": body.kind} if body.kind else {}
    async with opened.request(
        body.endpoint.method,
        URL(url + body.path, encoded=True),
        data=body.content,
        headers=headers,
        skip_auto_headers=["Content-Type"],
    ) as answer:
        content = await answer.read()
        text = content.decode(errors="replace")
        if answer.status == 200 and answer.content_type == "text/event-stream":
            return error_in(text) or (200, text)
        return answer.status, text


def error_in(stream: str) -> tuple[int, str] | None:
    """The error that a stream of events ends with, as a status and its event."""
    for line in stream.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or '"error' not in data:
            continue
        with contextlib.suppress(ValueError):
            event = json.loads(data)
            error = event.get("error") if isinstance(event, dict) else None
            if isinstance(error, dict):
                code = error.get("code")
                if not isinstance(code, int):
                    code = 400 if OF_THE_CLIENT.search(str(error.get("type"))) else 500
                return code, data
    return None
