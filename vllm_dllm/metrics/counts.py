"""Define the counters by decoding algorithm, and carry their increments to the front end.

Increments travel in a mapping of vLLM's scheduler statistics that holds integers by name, because
vLLM's messages between processes have no other place for them. They are removed from it before
vLLM's own loggers see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

_PREFIX = "dllm"


@dataclass
class Increments:
    """Counts of what happened to the requests of one algorithm, by the names in `COUNTERS`."""

    denoising_steps: int = 0
    commit_passes: int = 0
    waiting_passes: int = 0
    blocks: int = 0
    committed_tokens: int = 0
    generation_tokens: int = 0
    finished_requests: int = 0


# Field of `Increments` -> the counter's description in Prometheus.
COUNTERS: Mapping[str, str] = {
    "denoising_steps": "Number of passes over a request's canvas in which its algorithm ran.",
    "commit_passes": "Number of passes over a request's canvas that only committed it.",
    "waiting_passes": "Number of passes over a request's canvas in which it waited for others.",
    "blocks": "Number of canvases that have left.",
    "committed_tokens": "Number of committed (finalized) tokens.",
    "generation_tokens": "Number of tokens of answers.",
    "finished_requests": "Number of requests that have ended, for whatever reason.",
}
assert list(COUNTERS) == [field.name for field in fields(Increments)]


def metric_name(counter: str) -> str:
    """The name in Prometheus, to which the Prometheus client adds ``_total``.

    It must not contain the name of one of vLLM's counters, because ``vllm bench serve`` adds up all
    counters with ``num_denoising_steps`` or ``num_committed_tokens`` in their names.
    """
    return f"vllm:diffusion_{counter}_by_algorithm"


class Increment(NamedTuple):
    """A counter of an algorithm, and by how much it grows."""

    algorithm: str
    counter: str
    amount: int


def packed(increments: Mapping[str, Increments]) -> dict[str, int]:
    """Encode increments by algorithm as integers by name."""
    return {
        f"{_PREFIX}:{counter}:{algorithm}": amount
        for algorithm, each in increments.items()
        for counter, amount in zip(COUNTERS, astuple(each), strict=True)
        if amount
    }


def taken_from(numbers: dict[str, int]) -> list[Increment]:
    """Remove and return the increments that `packed` put among other numbers, which stay."""
    found = []
    for name in [name for name in numbers if name.startswith(f"{_PREFIX}:")]:
        _, counter, algorithm = name.split(":", 2)
        found.append(Increment(algorithm, counter, numbers.pop(name)))
    return found
