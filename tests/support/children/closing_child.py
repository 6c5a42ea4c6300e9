"""What is left of engines that have compiled constraints, after they were closed.

For each engine: the answers to more constraints than are compiled at a time, and the commands of
this process's children before and after it has closed the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import psutil
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.checkpoints import TINY_LLADA2

OPTIONS: dict[str, Any] = {
    "model": str(TINY_LLADA2),
    "enforce_eager": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 1 << 26,
}
PATTERNS = [f"{letter}{{3}}" for letter in "abcdefgh"]


def children() -> list[str]:
    """The command lines of the processes that this process has started and that still run."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # has ended, perhaps without a wait for it
            found.append(" ".join(child.cmdline()))
    return found


def params(pattern: str) -> SamplingParams:
    structured = StructuredOutputsParams(regex=pattern)
    return SamplingParams(temperature=0, max_tokens=30, structured_outputs=structured)


async def serve_and_shut_down() -> dict[str, Any]:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**OPTIONS))

    async def ask(pattern: str) -> str:
        outputs = [it async for it in llm.generate("copy ab", params(pattern), pattern)]
        return outputs[-1].outputs[0].text

    answers = await asyncio.gather(*map(ask, PATTERNS))
    before = children()
    llm.shutdown()
    return {"answers": answers, "before": before, "after": children()}


def generate_and_delete() -> dict[str, Any]:
    llm = LLM(**OPTIONS)
    llm.generate("copy ab", SamplingParams(temperature=0, max_tokens=8))
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    from canvas_grammar import pool

    # Whoever is not patient hears that the pool is busy before anything is compiled.
    *others, _ = pool.PoolLimits.__init__.__defaults__ or ()
    pool.PoolLimits.__init__.__defaults__ = (*others, 0.0)
    outputs = llm.generate(["copy ab"] * len(PATTERNS), list(map(params, PATTERNS)))
    answers = [output.outputs[0].text for output in outputs]
    before = children()
    del llm
    gc.collect()
    return {"answers": answers, "before": before, "after": children(), "loaded": loaded}


def closed() -> Iterator[dict[str, Any]]:
    """Of an `LLM`, and of an `AsyncLLM`."""
    yield generate_and_delete()
    yield asyncio.run(serve_and_shut_down())
