"""What a soak does to the server's processes, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from tests.support.soak.client import COMPLETED, FAILED, Answer, Outcome
from tests.support.soak.models import MEGABYTE

# Memory may grow in the first fifth of a run, and in its first 150 requests: by then
# `tiny-llada2` had grown from 1887 to 1972 MB (its processes together), and after 3000 to 1973 MB.
WARM_SHARE, WARM_REQUESTS = 0.2, 150
# Bytes of growth that are no leak, by measurement. After the warm-up the samples of a run lie
# within 7 MB, as steps are larger or smaller; medians of quarters differed by at most 3.5 MB.
# Of the API server and the engine core each request took 0.35 KB for good (requests 1000 to 3000).
NOISE, EACH = 8 * MEGABYTE, 1024


def unexpected(outcomes: Iterable[Outcome]) -> list[str]:
    """Requests that hung, broke, or were refused or answered against expectation."""
    return [f"{o.sending}: {o.detail}" for o in outcomes if o.status == FAILED]


def different(outcomes: Iterable[Outcome], alone: Mapping[str, Answer]) -> list[str]:
    """Completed answers that are not those of the same request, alone (by `Ask.name`).

    With tools only tokens count: vLLM reads calls and reasoning out of streamed and of whole
    answers by different code.
    """
    wrong = []
    for outcome in outcomes:
        got, ask = outcome.answer, outcome.sending.ask
        if outcome.status != COMPLETED or got is None:
            continue
        wanted = alone.get(ask.name)
        if wanted is None:
            wrong.append(f"{outcome.sending}: was never answered alone")
        elif got.tokens != wanted.tokens or (got != wanted and "tools" not in ask.body):
            wrong.append(f"{outcome.sending}: {got}, alone {wanted}")
    return wrong


class Sample(NamedTuple):
    """Memory of a process group in bytes, after so many requests."""

    requests: int
    resident: int


@dataclass(frozen=True)
class Growth:
    """What a run's samples say, by medians: a sample taken in a busy moment says nothing.

    In bytes: before the first request, in the first quarter after the warm-up, and in the last one.
    `requests` is the number of requests between the middles of those quarters.
    """

    start: int
    warm: int
    end: int
    requests: float

    @property
    def limit(self) -> float:
        """Bytes that are no leak."""
        return NOISE + EACH * self.requests

    def complaints(self) -> list[str]:
        """Whether memory is flat, as a list of what is wrong."""
        grown = self.end - self.warm
        if grown <= self.limit:
            return []
        return [
            f"memory grew by {grown / MEGABYTE:.1f} MB over {self.requests:.0f} requests, "
            f"{grown / self.requests / 1024:.1f} KB each; "
            f"the limit is {self.limit / MEGABYTE:.1f} MB"
        ]


def growth(samples: Sequence[Sample]) -> Growth:
    """Compare memory after the warm-up with the end; the first sample is before any request."""
    warm_up = max(WARM_REQUESTS, WARM_SHARE * samples[-1].requests)
    rest = [sample for sample in samples if sample.requests > warm_up]
    quarter = len(rest) // 4
    if quarter < 3:
        raise ValueError(f"{len(rest)} samples of memory after {warm_up:.0f} requests are too few")
    (at_first, warm), (at_last, end) = (
        map(statistics.median, zip(*part, strict=True))
        for part in (rest[:quarter], rest[-quarter:])
    )
    return Growth(samples[0].resident, int(warm), int(end), at_last - at_first)


SUSPICIOUS = re.compile(r"ERROR|CRITICAL|Traceback|Exception")
# vLLM begins each line of a record with the process, the time and the place in its source.
HEADER = re.compile(r"^(\(\w+ pid=\d+\) ERROR) \S+ \S+ (\[[^\]]+\]) ?")
TOLD = "Exception caught. Request id:"
INVALID = "RequestValidationError caught. Request id:"
STREAMED = re.compile(r"Error in (chat )?completion stream generator\.")
VALIDATION = "vllm.exceptions.VLLMValidationError: "


def log_errors(text: str, refused: int) -> list[str]:
    """Records of a server's log that speak of an error.

    vLLM logs an error for a request that is refused as it should be, too: a line of its HTTP
    handler and, if the answer would be streamed, a traceback that ends with
    ``VLLMValidationError``; a body that is no request at all has a traceback of its own.
    Those are left out, `refused` of either kind at most; everything else is reported.
    """
    wrong, refusals, streams = [], 0, 0
    for record in _error_records(text.splitlines()):
        first, last = record[0], record[-1]
        if (first.startswith(TOLD) and first is last) or first.startswith(INVALID):
            refusals += 1
        elif STREAMED.match(first) and last.startswith(VALIDATION):
            streams += 1
        else:
            wrong.append(f"log: {first[:200]}" + (f" ... {last[:200]}" if record[1:] else ""))
    most = max(refusals, streams)
    if most > refused:
        wrong.append(f"log: {most} requests were refused, of which {refused} should have been")
    return wrong


def _error_records(lines: Iterable[str]) -> list[list[str]]:
    """Error messages of one line or more, without their headers."""
    records: list[list[str]] = []
    before = None
    for line in lines:
        header = HEADER.match(line)
        if header is None:
            if SUSPICIOUS.search(line):
                records.append([line])
            before = None
            continue
        message, source = line[header.end() :], header.groups()
        if source != before or message.startswith((TOLD, INVALID)) or STREAMED.match(message):
            records.append([])
        records[-1].append(message)
        before = source
    return records


REQUESTS_EACH = 150  # the soak's requests for one fault
FROZEN_SECONDS = (0.5, 4.0)
FROZEN = "frozen engines"  # in a report


def processes(group: int) -> Iterator[psutil.Process]:
    """The processes of a group, with their memory and command line as `info`."""
    for process in psutil.process_iter(["memory_info", "cmdline"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                yield process


def resident_bytes(group: int) -> int:
    """Resident memory of all processes of a group, in bytes; those that end meanwhile are none."""
    return sum(process.info["memory_info"].rss for process in processes(group))


@dataclass
class Faults:
    """Freezes the engine, as on a machine that swaps, for every `REQUESTS_EACH` requests.

    `group` is the server's process group, and `wrong` what the server did that it should not.
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
        # vLLM gives the process this name.
        engines = [
            one for one in processes(self.group) if "EngineCore" in "".join(one.info["cmdline"])
        ]
        if not engines:
            self.wrong.append("no engine was found to freeze")
        try:
            for engine in engines:
                engine.suspend()
            await asyncio.sleep(self._draw.uniform(*FROZEN_SECONDS))
        finally:
            for engine in engines:
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.resume()
