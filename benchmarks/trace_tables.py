"""The table of `benchmarks/traces.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def traces(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["checkpoint, tokens", "requests", "a step, ms", "with traces, ms", "ratio", "logprobs"]
    for case, found in results.items():
        plain, traced, logprobs = (found[kind] for kind in ("plain", "trace", "logprobs"))
        ratios = (f"{each['ratio']:.3f}" for each in (traced, logprobs))
        yield [case, f"{found['requests']}", f"{plain['ms']:.2f}", f"{traced['ms']:.2f}", *ratios]
