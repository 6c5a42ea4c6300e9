"""A real engine inside this process, so that its block pool and slots can be looked at."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

# Read when vLLM is imported, which the functions below do late.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")


# To close an engine vLLM looks through all objects three times, which takes longer than all else of
# its life; here only after so many engines, and after a large one.
CLOSED_BEFORE_COLLECTING = 8
LARGE_BYTES = 1 << 28
_closed = itertools.count(1)


class Engine:
    """An `LLM` and short ways to what tests ask of it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        # Several workers are processes of their own.
        driver = getattr(self.core.model_executor, "driver_worker", None)
        self.runner = driver and driver.worker.model_runner

    @property
    def slots(self) -> Any:
        return self.runner.model_state.slots

    @property
    def block_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def generate(
        self, prompts: Sequence[Sequence[int] | dict[str, Any]], params: Sequence[Any]
    ) -> list[tuple[list[int], str]]:
        """Tokens and finish reasons; a prompt is tokens, or as vLLM takes it."""
        outputs = self.llm.generate(
            [it if isinstance(it, dict) else {"prompt_token_ids": list(it)} for it in prompts],
            list(params),
            use_tqdm=False,
        )
        return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]

    def close(self) -> None:
        """Take the engine down; nothing happens the second time."""
        if self.llm is None:
            return
        parameters = self.runner.model.parameters() if self.runner else ()
        large = sum(each.nbytes for each in parameters) > LARGE_BYTES
        with contextlib.ExitStack() as stack:
            if not large and next(_closed) % CLOSED_BEFORE_COLLECTING:
                for name in ("collect", "unfreeze"):
                    stack.enter_context(mock.patch.object(gc, name, lambda *_: 0))
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = self.core = self.scheduler = self.runner = None
            gc.collect()

    def step(self) -> None:
        """One step of the engine core, as its own loop runs it."""
        _, executed = self.core.step_fn()
        self.core.post_step(executed)

    def assert_idle(self) -> None:
        assert not self.scheduler.requests
        # One block is vLLM's null block.
        assert self.block_pool.get_num_free_blocks() == self.block_pool.num_gpu_blocks - 1
        # The worker hears of finished requests with the next step, if there is one.
        left = set(self.runner.req_states.req_id_to_index) - self.scheduler.finished_req_ids
        assert not left


def greedy(max_tokens: int, **options: Any) -> Any:
    """Sampling parameters; names with the ``diffusion_`` prefix become request options."""
    from vllm import SamplingParams

    extra = {name: options.pop(name) for name in list(options) if name.startswith("diffusion_")}
    return SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra or None, **options)


def settings(block: int) -> dict[str, Any]:
    """What every test engine is started with, unless it says otherwise."""
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 26,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "diffusion_config": {"canvas_length": block},
    }


@contextlib.contextmanager
def engine(model: Path, block: int, **options: Any) -> Iterator[Engine]:
    """Start an engine, and take it down so that another can follow in this process."""
    from vllm import LLM

    # A start collects garbage eight times, half a second each: mostly modules, which stay anyway.
    gc.freeze()
    running = Engine(LLM(model=str(model), **(settings(block) | options)))
    try:
        yield running
    finally:
        running.close()


def our_graphs() -> int:
    """How many graphs the compiler has made of our functions in this process.

    Its own count also has vLLM's, among them one for an embedding that is spread over ranks.
    """
    from torch._dynamo.eval_frame import _get_total_cache_entry_count as entries

    from vllm_dllm.ops.compiled import CompiledOnce
    from vllm_dllm.ops.noise.keyed import candidate_keys, step_noise
    from vllm_dllm.ops.statistics.rows import grouped_statistics
    from vllm_dllm.ops.statistics.sampled import draw, sampled_partials

    rows = (candidate_keys, draw, grouped_statistics, sampled_partials, step_noise)
    made = [one for one in gc.get_objects() if type(one) is CompiledOnce]
    once = sum(one._compiled is not None for one in made)
    return once + sum(entries(function) for function in rows)


def count_calls(owner: Any, name: str) -> list[Any]:
    """Wrap a method of a live object; the returned list grows by its first argument per call."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0] if args else None)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return calls
