"""LLaDA2 and DiffusionGemma on every path of CUDA give the tokens of the CPU backend.

LLaDA2 cuts a prefill chunk into virtual sequences, whose number depends on the batch, so full
graphs may replay canvases only. A batch of DiffusionGemma has one causal flag for each request,
which FlashAttention has from version 4 on, and which Triton's and our kernel take in full graphs of
mixed batches, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2
from tests.support.cuda_paths.backends import BACKENDS, FLASH_2, FLASH_4, OURS, TRITON, Backend
from tests.support.cuda_paths.start_up import cuda_paths
from tests.support.cuda_paths.watch import Watch
from tests.support.engine import Engine, count_calls, engine, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
LENGTH = 32  # of a canvas, in both checkpoints
SEATS = 4
# Full graphs for 1, 2 and 4 canvases: the last one replays three, too, with a row of padding.
SIZES = (1, 2, 4, 8)
LIMIT = 23 * LENGTH  # of a context
TASKS = (
    *("64 + 28", "sort 61 35 88 14", "reverse 52 97 23 71 40"),
    *("copy diffusion", "count from 12 to 16", "(7-2)*8"),
)
# Tokens of random prompts: within a block, at its edges, over many, and nearly the whole context.
LENGTHS = (1, 300, 33, 700, 64, 511, 31)


@dataclass(frozen=True)
class Model:
    path: Path
    pages: int
    options: dict[str, Any]
    request: dict[str, Any]
    window: int = LENGTH  # tokens that a step reads for each canvas


# Pages for one long prompt and a half; DiffusionGemma's layers are of three kinds.
LLADA2 = Model(TINY_LLADA2, 44, {}, {"diffusion_threshold": 0.9})
TWO_BLOCKS = replace(
    LLADA2,
    options={"additional_config": {"dllm": {"fused_commit": "on"}}},
    window=2 * LENGTH,
)
GEMMA = Model(TINY_GEMMA, 84, TEXT_ONLY_OPTIONS, {})
THREE: dict[str, Any] = {"additional_config": {"dllm": {"passes_per_step": 3}}}


def options(model: Model, asynchronous: bool) -> dict[str, Any]:
    """Options of the engine: few seats, and too few pages for all long prompts at once."""
    return {
        "max_num_seqs": SEATS,
        "max_model_len": LIMIT,
        "block_size": LENGTH,
        "kv_cache_memory_bytes": 1 << 26,
        "num_gpu_blocks_override": model.pages,
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
    watch: Watch
    tokens: list[list[int]]
    mode: str
    graphs: int


def run(model: Model, backend: Backend, mode: str, asynchronous: bool) -> Run:
    """Start an engine with this backend and this ``cudagraph_mode``, and let it answer."""
    graphs = {
        "mode": 0,
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": [size * model.window for size in SIZES],
    }
    with (
        cuda_paths(backend) as watch,
        engine(
            model.path,
            LENGTH,
            enforce_eager=False,
            attention_backend=backend.name,
            compilation_config=graphs,
            **options(model, asynchronous),
        ) as running,
    ):
        manager = running.runner.cudagraph_manager
        # The warm-up has left nothing behind.
        running.assert_idle()
        assert not running.runner.model_state.slot_of
        assert watch.whole_rows > 0, "the warm-up has no filters, or never came"
        watch.steps.clear()
        preempted = count_calls(running.scheduler, "_preempt_request")
        tokens = answers(running, model)
        running.assert_idle()
        watch.preempted = len(preempted)
        return Run(watch, tokens, manager.cudagraph_mode.name, len(manager.graphs))


def plain(model: Model) -> list[list[int]]:
    with engine(model.path, LENGTH, **options(model, asynchronous=False)) as running:
        return answers(running, model)


def check(found: Run, tokens: list[list[int]], graphs: str) -> None:
    """The tokens of the CPU backend, in this mode of graphs, and no problem on the way there."""
    watch = found.watch
    assert not watch.problems, watch.problems[:3]
    assert found.tokens == tokens
    assert found.mode == graphs
    assert watch.calls > 0, "no kernel of the backend"
    # Without graphs every step is eager; batches that no graph takes always are.
    modes = {"NONE": set(), "PIECEWISE": {"PIECEWISE"}, "FULL": {"FULL"}}
    modes |= {"FULL_DECODE_ONLY": {"FULL"}, "FULL_AND_PIECEWISE": {"FULL", "PIECEWISE"}}
    assert watch.steps.keys() - {"NONE"} == modes[graphs]
    assert found.graphs == (0 if "FULL" not in modes[graphs] else 4 if graphs == "FULL" else 3)
    # Three passes in a step make the same answers fewer steps.
    steps, mixed = (3, 4) if watch.further else (5, 5)
    assert all(watch.steps[kind] >= steps for kind in modes[graphs])
    assert watch.mixed >= mixed
    assert watch.padded > 0 or "FULL" not in modes[graphs]


# In a window of two blocks all canvases have queries of two blocks, for which one graph is enough,
# with padding, too.
# In a step of three passes the graph of the first one is replayed, which reads canvases that have
# left, too.
MODELS = {
    "llada2": LLADA2,
    "two blocks": TWO_BLOCKS,
    "gemma": GEMMA,
    "llada2, 3 passes": replace(LLADA2, options=THREE),
    "gemma, 3 passes": replace(GEMMA, options=TEXT_ONLY_OPTIONS | THREE),
}
# Of both models each backend, each scheduling, and together each mode.
QUICK = {
    ("llada2", FLASH_2, "FULL", "sync"),
    ("llada2", FLASH_4, "FULL_AND_PIECEWISE", "async"),
    ("llada2", TRITON, "NONE", "async"),
    ("llada2", OURS, "FULL_DECODE_ONLY", "sync"),
    ("two blocks", FLASH_4, "FULL_AND_PIECEWISE", "async"),
    ("gemma", TRITON, "FULL", "async"),
    ("gemma", FLASH_4, "FULL_DECODE_ONLY", "sync"),
    ("gemma", OURS, "PIECEWISE", "async"),
    ("llada2, 3 passes", FLASH_4, "FULL_AND_PIECEWISE", "async"),
    ("gemma, 3 passes", TRITON, "FULL", "sync"),
}


def cases() -> Iterator[object]:
    every = (
        *product(["llada2"], BACKENDS, MODES, ("sync", "async")),
        *product(["two blocks"], BACKENDS, MODES[1:4], ("async",)),
        *product(["gemma"], BACKENDS[1:], MODES, ("sync", "async")),
        *product(["llada2, 3 passes"], BACKENDS, MODES[2:4], ("sync", "async")),
        *product(["gemma, 3 passes"], BACKENDS[1:], MODES[2:], ("sync", "async")),
    )
    for case in every:
        marks = () if case in QUICK else pytest.mark.long
        yield pytest.param(*case, marks=marks, id="-".join(map(str, case)))


@cache
def tokens(name: str) -> list[list[int]]:
    """What the CPU backend answers, in one block for each canvas."""
    return plain(GEMMA if name.startswith("gemma") else LLADA2)


@pytest.mark.parametrize(("name", "backend", "mode", "scheduling"), cases())
def test_same_tokens(name: str, backend: Backend, mode: str, scheduling: str) -> None:
    # First, because an engine must have run before, see `cuda_paths`.
    wanted = tokens(name)
    found = run(MODELS[name], backend, mode, scheduling == "async")
    lowered = mode == "FULL" and not (name.startswith("gemma") and backend == TRITON)
    check(found, wanted, "FULL_DECODE_ONLY" if lowered else mode)
    assert found.watch.preempted > 0 or name.startswith("gemma")
    assert (found.watch.further >= 10) == ("3 passes" in name)
    assert (found.watch.stopped > 0) == ("3 passes" in name)


@pytest.mark.parametrize(
    ("model", "backend", "reason"),
    [
        # Some of its buffers have an entry for each request only, and a prompt has more blocks.
        (LLADA2, Backend("FLASHINFER"), "--attention-backend FLASHINFER: it has not been tried"),
        (
            GEMMA,
            Backend("FLASH_ATTN", 3),
            "--attention-backend FLASH_ATTN: .*FlashAttention 3 has no causal flag",
        ),
        # By vLLM, before our start-up.
        (GEMMA, Backend("FLASHINFER"), "FlashInfer does not support DiffusionGemma's mixed"),
    ],
    ids=str,
)
def test_a_backend_that_cannot_serve_the_model_is_refused(
    model: Model, backend: Backend, reason: str
) -> None:
    tokens("llada2")
    with pytest.raises((ValueError, RuntimeError), match=reason):
        run(model, backend, "FULL_AND_PIECEWISE", asynchronous=True)
