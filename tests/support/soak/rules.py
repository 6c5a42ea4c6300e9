"""What must hold after a soak: pure rules, each a list of what is wrong."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.soak.client import COMPLETED, FAILED, Answer, Outcome

MEGABYTE = 1 << 20
# Memory may grow in the first fifth of a run, and in its first 150 requests: by then
# `tiny-llada2` had grown from 1887 to 1972 MB (its processes together), and after 3000 to 1973 MB.
WARM_SHARE, WARM_REQUESTS = 0.2, 150
# Bytes of growth that are no leak, by measurement. Behind the warm-up the samples of a run lie
# within 7 MB, as steps are larger or smaller; medians of quarters differed by at most 3.5 MB.
# Of the API server and the engine core each request took 0.35 KB for good (requests 1000 to 3000).
# So a request may leave behind 32 KB in a run of 500, 5.5 KB in 3000 and 1.7 KB in 20,000; the
# logits of one canvas of the tiny models have 34 KB.
NOISE, EACH = 8 * MEGABYTE, 1024


# ---- answers


def unexpected(outcomes: Iterable[Outcome]) -> list[str]:
    """Requests that hung, broke, or were refused or answered against expectation."""
    return [f"{o.sending}: {o.detail}" for o in outcomes if o.status == FAILED]


def different(outcomes: Iterable[Outcome], alone: Mapping[str, Answer]) -> list[str]:
    """Completed answers that are not those of the same request, alone (by `Ask.name`)."""
    wrong = []
    for outcome in outcomes:
        if outcome.status != COMPLETED or outcome.answer is None:
            continue
        wanted = alone.get(outcome.sending.ask.name)
        if wanted is None:
            wrong.append(f"{outcome.sending}: was never answered alone")
        elif not _same(outcome, wanted):
            wrong.append(f"{outcome.sending}: {_difference(outcome.answer, wanted)}")
    return wrong


def _same(outcome: Outcome, wanted: Answer) -> bool:
    """Whether an answer is the wanted one.

    With tools only tokens count: vLLM reads calls and reasoning out of streamed and of whole
    answers by different code.
    """
    if outcome.answer is not None and "tools" in outcome.sending.ask.body:
        return outcome.answer.tokens == wanted.tokens
    return outcome.answer == wanted


def _difference(got: Answer, wanted: Answer) -> str:
    pairs = enumerate(zip(got.tokens, wanted.tokens, strict=False))
    shorter = min(len(got.tokens), len(wanted.tokens))
    first = next((n for n, (a, b) in pairs if a != b), shorter)
    return (
        f"differs at token {first}: {got.tokens[first : first + 4]} of {len(got.tokens)} tokens "
        f"({got.reason}), alone {wanted.tokens[first : first + 4]} of {len(wanted.tokens)} "
        f"({wanted.reason})"
    )


# ---- memory


@dataclass(frozen=True)
class Sample:
    """Memory of a process group in bytes, after so many requests."""

    requests: int
    resident: int


@dataclass(frozen=True)
class Growth:
    """What a run's samples say, by medians: a sample taken in a busy moment says nothing.

    Attributes:
        start: bytes before the first request.
        warm: bytes in the first quarter of what follows the warm-up.
        end: bytes in its last quarter.
        requests: requests between the middles of those quarters.
    """

    start: int
    warm: int
    end: int
    requests: float

    @property
    def grown(self) -> int:
        """Bytes, negative where memory shrank."""
        return self.end - self.warm

    @property
    def limit(self) -> float:
        """Bytes that are no leak."""
        return NOISE + EACH * self.requests

    def complaints(self) -> list[str]:
        """Whether memory is flat, as a list of what is wrong."""
        if self.grown <= self.limit:
            return []
        return [
            f"memory grew by {self.grown / MEGABYTE:.1f} MB over {self.requests:.0f} requests, "
            f"{self.grown / self.requests / 1024:.1f} KB each; "
            f"the limit is {self.limit / MEGABYTE:.1f} MB"
        ]


def growth(samples: Sequence[Sample]) -> Growth:
    """Compare memory behind the warm-up with the end.

    Args:
        samples: in order; the first one before any request, the last one behind the last.

    Raises:
        ValueError: too few samples to tell.
    """
    warm_up = max(WARM_REQUESTS, WARM_SHARE * samples[-1].requests)
    rest = [sample for sample in samples if sample.requests > warm_up]
    quarter = len(rest) // 4
    if quarter < 3:
        raise ValueError(f"{len(rest)} samples of memory behind {warm_up:.0f} requests are too few")
    (warm, at_first), (end, at_last) = map(_middle, (rest[:quarter], rest[-quarter:]))
    return Growth(samples[0].resident, int(warm), int(end), at_last - at_first)


def _middle(samples: Sequence[Sample]) -> tuple[float, float]:
    """Median memory and number of requests."""
    return (
        statistics.median(sample.resident for sample in samples),
        statistics.median(sample.requests for sample in samples),
    )


def resident_bytes(group: int) -> int:
    """Resident memory of all processes of a group, in bytes; those that end meanwhile are none."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the command's name, which may hold blanks: state, parent, group.
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            status = (entry / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found = re.search(r"^VmRSS:\s*(\d+) kB", status, re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return total


# ---- log

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
        told = message.startswith((TOLD, INVALID))
        begins = source != before or told or STREAMED.match(message)
        if begins:
            records.append([])
        records[-1].append(message)
        before = source
    return records
