"""The channel for counts by decoding algorithm, from the scheduler to the front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "dllm"
# (algorithm, counter) -> by how much it grows.
Counts = Mapping[tuple[str, str], int]


def put_counts(stats: Any, counts: Counts) -> None:
    """Send counts with vLLM's ``SchedulerStats``."""
    stats.num_kv_fetch_reqs_by_stage |= {
        f"{_PREFIX}:{counter}:{algorithm}": number
        for (algorithm, counter), number in counts.items()
    }


def take_counts(stats: Any) -> Counts:
    """Remove and return what `put_counts` was given."""
    numbers, found = stats.num_kv_fetch_reqs_by_stage, {}
    for name in [name for name in numbers if name.startswith(f"{_PREFIX}:")]:
        _, counter, algorithm = name.split(":", 2)
        found[algorithm, counter] = numbers.pop(name)
    return found
