"""Several processes give what one gives.

Tensor parallel: the head's shards meet in statistics or logits, and ranks draw the same. Pipeline
parallel: stages that see no logits still know where a request's canvas begins and what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference_gemma
from tests.support.answers import answers
from tests.support.checkpoints import TINY_LLADA2
from tests.support.child import in_child
from tests.support.engine import engine, our_graphs, settings
from tests.support.reference_llada2 import random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# A power of two, so that the shards are whole groups of ids and draw what one rank draws.
VOCABULARY = 512
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 1.0, "seed": 3}
# A model family and what its two ranks are asked, batch by batch.
TENSOR: dict[str, list[list[dict[str, Any]]]] = {
    "llada2": [
        [GREEDY, SAMPLED, {"temperature": 0.5, "seed": 9}],
        [SAMPLED, SAMPLED | {"top_k": 3}, GREEDY | {"logprobs": 1}],  # needs whole rows
    ],
    "gemma": [
        [  # the seed also draws the first canvas
            {"temperature": 0, "seed": 1},
            SAMPLED,
            {"temperature": 2.0, "seed": 4, "top_k": 20},
            {"temperature": 1.0, "seed": 5, "logprobs": 2},
        ]
    ],
}
# One token: vLLM takes such a prompt's last chunk for the end of the request.
STAGED = [
    GREEDY,
    SAMPLED,
    GREEDY | {"max_tokens": 1},
    GREEDY | {"logprobs": 1, "top_k": 3},
    # Only the last stage knows how far a preempted canvas had come.
    SAMPLED | {"extra_args": {"diffusion_stream_prefix": True, "diffusion_threshold": 2.0}},
]
# 16 pages of 32 for 25 requests of up to four: some are preempted and come back.
STAGES: dict[str, dict[str, Any]] = {
    "asynchronous": {"async_scheduling": True},
    "chunked and preempted": {
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "num_gpu_blocks_override": 17,
        "enable_prefix_caching": False,
    },
}


def graphs(worker: Any) -> int:
    """`our_graphs` on a rank."""
    return our_graphs()


def by_ranks(model: str, batches: list[Any], options: dict[str, Any]) -> Iterator[Any]:
    """The answers of an engine with several ranks to batch after batch, in a process of its own.

    At last how often it preempted, and how many graphs of our functions each rank's compiler made
    when the engine started and in all.
    """
    from vllm import LLM

    llm = LLM(model=model, disable_log_stats=False, **(settings(32) | options))
    made = llm.collective_rpc(graphs)
    for cases in batches:
        yield answers(llm, cases)
    preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    yield preempted, made, llm.collective_rpc(graphs)


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_constrained(axis: str) -> None:
    """Every rank that decodes follows the same automaton, over more than one canvas."""
    model = TINY_LLADA2
    three = {"structured_outputs": {"regex": "([a-z]{3}-){12}end"}}
    follows = three | {"max_tokens": 60, "ignore_eos": False}
    cases = [GREEDY | follows, SAMPLED | follows, SAMPLED]
    two, _ = in_child(by_ranks, model, [cases], {axis: 2})
    with engine(model, 32) as running:
        assert two == answers(running.llm, cases)
    assert all(len(tokens) == 52 for n, tokens in enumerate(two) if n % 3 < 2)


def two_ranks_and_one(name: str, model: Path, **options: Any) -> tuple[list, list, list]:
    """What two ranks print, and the answers of one, both with `options`."""
    if name == "gemma":
        reference_gemma.random_checkpoint(model, 0, vocab_size=VOCABULARY)
    else:
        random_checkpoint(model, 0, vocab_size=VOCABULARY)
    both = options | {"tensor_parallel_size": 2}
    *two, counts = in_child(by_ranks, model, TENSOR[name], both)
    with engine(model, 32, **options) as running:
        return two, counts, [answers(running.llm, cases) for cases in TENSOR[name]]


@pytest.mark.parametrize("name", ["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def test_tensor_parallel(name: str, tmp_path: Path) -> None:
    two, _, one = two_ranks_and_one(name, tmp_path)
    assert two == one


@pytest.mark.long
@pytest.mark.parametrize("name", TENSOR)
def test_compiled(name: str, tmp_path: Path) -> None:
    """What vLLM compiles by default, on two ranks; a compiled forward may round otherwise."""
    two, (_, made, in_all), one = two_ranks_and_one(name, tmp_path, enforce_eager=False)
    assert two == one
    assert min(made) > 0
    assert in_all == made, "compiled while serving"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model, and the answers of one process."""
    model = tmp_path_factory.mktemp("staged")
    random_checkpoint(model, 0, vocab_size=VOCABULARY)
    with engine(model, 32) as running:
        return model, answers(running.llm, STAGED)


@pytest.mark.long
@pytest.mark.parametrize("name", ["asynchronous", "chunked and preempted"])
def test_pipeline_parallel(name: str, staged: tuple[Path, list[list[int]]]) -> None:
    model, one = staged
    options = {"pipeline_parallel_size": 2} | STAGES[name]
    two, (preemptions, *_) = in_child(by_ranks, model, [STAGED], options)
    assert two == one
    assert (preemptions[0] > 0) == ("preempted" in name)


def test_a_failure_on_one_rank_ends_the_engine() -> None:
    """The ranks' slots would differ, so that some wait for others forever."""
    worker = {"worker_cls": "tests.support.failing_worker.WorkerThatTakesNoRequest"}
    with pytest.raises(AssertionError, match=r"EngineDeadError|[Dd]ied|cancelled"):
        in_child(by_ranks, TINY_LLADA2, [[GREEDY]], {"tensor_parallel_size": 2} | worker)
