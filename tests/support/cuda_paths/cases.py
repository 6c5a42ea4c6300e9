"""One engine on the paths of CUDA: the prompts, the run, and what is expected of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2
from tests.support.cuda_paths.start_up import cuda_paths
from tests.support.cuda_paths.watch import Watch
from tests.support.engine import Engine, engine, greedy

LENGTH = 32  # of a canvas, in both checkpoints
SEATS = 4
# Full graphs for 1, 2 and 4 canvases: three of them replay with a row of padding.
SIZES = (LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH)
LIMIT = 23 * LENGTH  # of a context
TASKS = (
    "64 + 28",
    "sort 61 35 88 14",
    "reverse 52 97 23 71 40",
    "copy diffusion",
    "count from 12 to 16",
    "(7-2)*8",
)
# Tokens of random prompts: within a block, at its edges, over many, and nearly the whole context.
LENGTHS = (1, 300, 33, 700, 64, 511, 31)


@dataclass(frozen=True)
class Model:
    """A checkpoint, and how it is served in these tests."""

    path: Path
    options: dict[str, Any]
    request: dict[str, Any]


LLADA2 = Model(TINY_LLADA2, {}, {"diffusion_threshold": 0.9})
GEMMA = Model(TINY_GEMMA, TEXT_ONLY_OPTIONS, {})


def options(model: Model, asynchronous: bool) -> dict[str, Any]:
    """Options of the engine: few seats, and too few pages for four long prompts."""
    return {
        "max_num_seqs": SEATS,
        "max_model_len": LIMIT,
        "block_size": LENGTH,
        "kv_cache_memory_bytes": 1 << 26,
        "num_gpu_blocks_override": 44,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "async_scheduling": asynchronous,
        **model.options,
    }


def answers(running: Engine, model: Model) -> list[list[int]]:
    """Tokens of the same prompts for every engine, all submitted at once."""
    tokenizer = running.llm.get_tokenizer()
    draw = random.Random(3)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for text in TASKS
    ]
    asked = [(prompt, greedy(64, seed=5, **model.request)) for prompt in prompts]
    for nth, length in enumerate(LENGTHS):
        # They are answered with nonsense of several canvases, the last of which is cut.
        params = greedy(33 + 17 * (nth % 3), seed=5, ignore_eos=True, **model.request)
        asked.append(([draw.randrange(12, 250) for _ in range(length)], params))
    draw.shuffle(asked)  # so that prefills meet canvases
    return [tokens for tokens, _ in running.generate(*zip(*asked, strict=True))]


@dataclass
class Run:
    """What came of an engine on the paths of CUDA."""

    watch: Watch
    tokens: list[list[int]]
    mode: str
    graphs: int


def run(model: Model, backend: str, mode: str, asynchronous: bool) -> Run:
    """Start an engine with this backend and this ``cudagraph_mode``, and let it answer.

    Raises:
        ValueError: the start-up refuses the combination.
    """
    graphs = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": list(SIZES)}
    with (
        cuda_paths(backend) as watch,
        engine(
            model.path,
            LENGTH,
            enforce_eager=False,
            compilation_config=graphs,
            **options(model, asynchronous),
        ) as running,
    ):
        manager = running.runner.cudagraph_manager
        tokens = answers(running, model)
        running.assert_idle()
        return Run(watch, tokens, manager.cudagraph_mode.name, len(manager.graphs))


def plain(model: Model) -> Iterator[list[list[int]]]:
    """The tokens of vLLM's CPU backend without graphs."""
    with engine(model.path, LENGTH, **options(model, asynchronous=False)) as running:
        yield answers(running, model)
