"""The result of `benchmarks/sdar.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WAYS = {
    "two blocks": "commits with every step of the next block",
    "granted": "with its first step (synchronous scheduling)",
    "separate": "in passes of their own",
    "loop": "loop in transformers with a KV cache",
    "autoregressive": "vLLM, autoregressive",
}


def sdar_tiny(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield ["requests at a time", "vllm-dllm", "loop, so many in lockstep", "to it", "to one by one"]
    alone = results["tiny"]["1"]["loop"]
    for at_once, speed in results["tiny"].items():
        ours, loop = speed["vllm-dllm"], speed["loop"]
        ratios = f"{ours / loop:.2f}x", f"{ours / alone:.2f}x"
        yield [at_once, f"{ours:.0f}", f"{loop:.0f}", *ratios]


def sdar_wide(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield [
        *("requests", "system", "tokens/s", "passes a block", "to separate commits"),
        *("to the loop in lockstep", "to one by one"),
    ]
    alone = results["wide"]["1"]["loop"]["tokens_per_second"]
    for at_once, systems in results["wide"].items():
        speeds = {name: each["tokens_per_second"] for name, each in systems.items()}
        for name, title in WAYS.items():
            passes, speed = systems[name]["passes_per_block"], speeds[name]
            yield [
                *(at_once, title, f"{speed:.1f}", f"{passes:.2f}" if passes else "-"),
                f"{speed / speeds['separate']:.2f}x",
                f"{speed / speeds['loop']:.2f}x",
                f"{speed / alone:.2f}x",
            ]
