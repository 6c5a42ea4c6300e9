"""Several processes give what one gives: tokens, and the traces of mixed requests.

Tensor parallel: the head's shards meet in statistics or logits, and ranks draw the same. Pipeline
parallel: stages that see no logits still know where a request's canvas begins and what it reads.
Experts that are spread (``--enable-expert-parallel``): on the CPU the option is refused, because
vLLM's kernel takes no map of experts. Here plain PyTorch takes the kernel's place, so that all that
surrounds it is tried; see `tests.support.spread_experts`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import reference_gemma, reference_llada2, reference_sdar
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_LLADA2
from tests.support.child import in_child
from tests.support.engine import engine, our_graphs, settings
from tests.support.families import dllm
from tests.support.long import long_but
from tests.support.mixed_requests import FAMILIES, completions, mixed

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def answers(llm: Any, cases: list[dict[str, Any]]) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    generator = torch.Generator().manual_seed(0)
    last = llm.llm_engine.model_config.get_vocab_size() - 20
    prompts, params = [], []
    for length in (3, 20, 32, 40, 70):
        prompt = torch.randint(20, last, (length,), generator=generator).tolist()
        for case in cases:
            prompts.append({"prompt_token_ids": prompt})
            asked = {"max_tokens": 40, "ignore_eos": True} | case
            if "structured_outputs" in asked:
                asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
            params.append(SamplingParams(**asked))
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


# A power of two, so that the shards are whole groups of ids and draw what one rank draws.
VOCABULARY = 512
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
MAKE: dict[str, Callable[[Path], Any]] = {
    "llada2": lambda path: reference_llada2.random_checkpoint(path, 0, vocab_size=VOCABULARY),
    "gemma": lambda path: reference_gemma.random_checkpoint(path, 0, vocab_size=VOCABULARY),
    "sdar": lambda path: reference_sdar.random_checkpoint(path, experts=True, block=4),
}
# What two ranks of a family are asked, batch by batch.
ASKED: dict[str, list[list[dict[str, Any]]]] = {
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


@pytest.mark.parametrize(
    ("name", "compiled"), long_but([("llada2", False)], product(ASKED, (False, True)))
)
def test_tensor_parallel(name: str, compiled: bool, tmp_path: Path) -> None:
    """Also what vLLM compiles by default; then nothing is compiled while serving."""
    MAKE[name](tmp_path)
    options = {"enforce_eager": not compiled}
    *two, (_, made, in_all) = in_child(by_ranks, tmp_path, ASKED[name], options | TENSOR)
    with engine(tmp_path, 32, **options) as running:
        assert two == [answers(running.llm, cases) for cases in ASKED[name]]
    assert in_all == made
    assert (min(made) > 0) == compiled


@pytest.mark.long
@pytest.mark.parametrize("axis", [TENSOR, PIPELINE], ids=str)
def test_constrained(axis: dict[str, int]) -> None:
    """Every rank that decodes follows the same automaton, over more than one canvas."""
    follows = {"structured_outputs": {"regex": "([a-z]{3}-){12}end"}, "max_tokens": 60}
    follows["ignore_eos"] = False
    cases = [GREEDY | follows, SAMPLED | follows, SAMPLED]
    two, _ = in_child(by_ranks, TINY_LLADA2, [cases], axis)
    with engine(TINY_LLADA2, 32) as running:
        assert two == answers(running.llm, cases)
    assert all(len(tokens) == 52 for n, tokens in enumerate(two) if n % 3 < 2)


# One token: vLLM takes such a prompt's last chunk for the end of the request.
STAGED = [
    GREEDY,
    SAMPLED,
    GREEDY | {"max_tokens": 1},
    GREEDY | {"logprobs": 1, "top_k": 3},
    # Only the last stage knows how far a preempted canvas had come.
    SAMPLED | {"extra_args": {"diffusion_stream_prefix": True, "diffusion_threshold": 2.0}},
]


@pytest.mark.long
@pytest.mark.parametrize("preempted", [False, True], ids=["asynchronous", "chunked, preempted"])
def test_pipeline_parallel(preempted: bool, tmp_path: Path) -> None:
    MAKE["llada2"](tmp_path)
    options: dict[str, Any] = {"async_scheduling": True}
    if preempted:  # 16 pages of 32 for 25 requests of up to four: some come back
        options = {"num_gpu_blocks_override": 17, "enable_prefix_caching": False}
        options |= {"block_size": 32, "max_num_batched_tokens": 256}
    two, (preemptions, *_) = in_child(by_ranks, tmp_path, [STAGED], options | PIPELINE)
    with engine(tmp_path, 32) as running:
        assert two == answers(running.llm, STAGED)
    assert (preemptions[0] > 0) == preempted


def test_a_failure_on_one_rank_ends_the_engine() -> None:
    """The ranks' slots would differ, so that some wait for others forever."""
    worker = {"worker_cls": "tests.support.failing_worker.WorkerThatTakesNoRequest"}
    with pytest.raises(AssertionError, match=r"EngineDeadError|[Dd]ied|cancelled"):
        in_child(by_ranks, TINY_LLADA2, [[GREEDY]], TENSOR | worker)


# ---- Traces

CLOCK = ("engine_step", "milliseconds")  # differ from run to run
ROUNDED = ("probability", "logprob")


def told(running: Any, family: str) -> list[list[tuple[list[int], dict[str, Any]]]]:
    """Tokens and trace of every answer to every request."""
    found = completions(running, list(mixed(family, 30)), {"diffusion_trace": True})
    return [[(list(o.token_ids), o.diffusion_trace.as_json()) for o in each] for each in found]


def told_by_ranks(family: str, options: dict[str, Any]) -> Iterator[Any]:
    """The same of an engine with several ranks, in a process of its own."""
    from vllm import LLM

    path, length, _, _ = FAMILIES[family]
    llm = LLM(model=str(path), **(settings(length) | options))
    yield told(SimpleNamespace(llm=llm), family)


def compared(trace: dict[str, Any]) -> tuple[Any, list[float]]:
    """What is the same in every run, and the numbers that ranks add up in another order."""
    floats = [*trace["probabilities"], *trace["logprobs"]]
    blocks = []
    for block in trace["blocks"]:
        floats += [event[name] or 0.0 for event in block["events"] for name in ROUNDED]
        events = [{k: v for k, v in e.items() if k not in ROUNDED} for e in block["events"]]
        # Who waited for whom depends on the batch, which ranks do not change.
        passes = [{k: v for k, v in p.items() if k not in CLOCK} for p in block["passes"]]
        blocks.append(block | {"events": events, "passes": passes})
    rest = {k: v for k, v in trace.items() if k not in ("probabilities", "logprobs")}
    return rest | {"blocks": blocks}, floats


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "axis"),
    [(f, a) for f in FAMILIES for a in (TENSOR, PIPELINE) if (f, a) != ("gemma", PIPELINE)],
    ids=str,
)
def test_traces(family: str, axis: dict[str, int]) -> None:
    path, length, _, _ = FAMILIES[family]
    # A pipeline has no pass that commits one canvas and denoises the next.
    options = TEXT_ONLY_OPTIONS if family == "gemma" else dllm(fused_commit="off")
    (two,) = in_child(told_by_ranks, family, options | axis)
    with engine(path, length, **options) as running:
        one = told(running, family)
    for outputs, others in zip(one, two, strict=True):
        for (tokens, trace), (their_tokens, their_trace) in zip(outputs, others, strict=True):
            assert tokens == their_tokens
            (same, floats), (theirs, their_floats) = compared(trace), compared(their_trace)
            assert same == theirs
            assert floats == pytest.approx(their_floats, abs=1e-4)


# ---- Spread experts

CASES: list[dict[str, Any]] = [
    GREEDY | {"seed": 1},  # of DiffusionGemma's first canvas
    SAMPLED,
    {"temperature": 0.5, "seed": 9, "top_k": 20},
]
FEW = CASES[:1]
# Random models have near ties, which another order of summation decides otherwise. Of LLaDA2's
# answers none may differ, of the others' 15 or 20 so many. (LLaDA2's has groups of experts and a
# shared one.)
MAY_DIFFER = {"llada2": 0, "sdar": 2, "gemma": 2}
SPREAD = {"enable_expert_parallel": True}
OWN: dict[str, dict[str, Any]] = {
    "llada2": {},
    "sdar": {"diffusion_config": {"canvas_length": 4}},
    "gemma": TEXT_ONLY_OPTIONS,
}
EXPERTS = 8
# A checkpoint, options, and the answers of one engine with vLLM's own kernel.
Family = tuple[Path, dict[str, Any], list[list[int]]]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    model, options = tmp_path_factory.mktemp(request.param), OWN[request.param]
    MAKE[request.param](model)
    with engine(model, 32, **options) as running:
        alone = answers(running.llm, CASES)
    with engine(model, 32, **SPREAD, **options) as running:
        assert answers(running.llm, CASES) == alone, "one rank has all experts"
    return model, options, alone


def by_spread_experts(
    model: str, cases: list[dict[str, Any]], options: dict[str, Any]
) -> Iterator[Any]:
    """The answers of an engine, and what `Recorder` notes on each rank, in a process of its own.

    With vLLM's variables of data parallelism in its environment it is one rank of several.
    """
    from vllm import LLM

    from tests.support.spread_experts import spread

    spread()
    extension = "tests.support.spread_experts.Recorder"
    llm = LLM(model=model, worker_extension_cls=extension, **(settings(32) | options))
    yield answers(llm, cases), llm.collective_rpc("experts")


def assert_equal(model: Path, found: list[list[int]], alone: list[list[int]]) -> None:
    different = [n for n, pair in enumerate(zip(found, alone, strict=True)) if pair[0] != pair[1]]
    name = next(name for name in OWN if model.name.startswith(name))
    assert len(different) <= MAY_DIFFER[name], different


def halves(noted: list[dict[str, Any]]) -> bool:
    """Whether each of two ranks held its own half of the experts, and computed with no others."""
    own = list(range(EXPERTS // 2))
    absent = [-1] * (EXPERTS // 2)
    return [(n["held"], n["maps"]) for n in noted] == [
        ([EXPERTS // 2], [own + absent]),
        ([EXPERTS // 2], [absent + own]),
    ]


@pytest.mark.long
@pytest.mark.parametrize("family", ["llada2", "gemma"], indirect=True)
def test_spread_over_tensor_parallel_ranks(family: Family) -> None:
    """Attention is split over the ranks, and experts are spread over them.

    SDAR's random model has near ties; see `test_families`, which knows them.
    """
    model, options, alone = family
    both = SPREAD | options | TENSOR
    ((found, noted),) = in_child(by_spread_experts, model, CASES, both)
    assert halves(noted)
    assert_equal(model, found, alone)


@pytest.mark.long
@pytest.mark.parametrize("family", OWN, indirect=True)
def test_spread_over_data_parallel_ranks(family: Family) -> None:
    """Each rank has requests of its own, and their rows go to the experts of both.

    The second rank has fewer of them, so that it takes part in the steps of the first at last.
    """
    model, options, alone = family
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def rank(number: int) -> Any:
        shared = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1"}
        shared |= {"VLLM_DP_MASTER_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1"}
        own = {"VLLM_DP_RANK": str(number), "VLLM_DP_RANK_LOCAL": str(number)}
        environment = os.environ | shared | own | {"GLOO_SOCKET_IFNAME": "lo"}
        cases = FEW if number else CASES
        (answer,) = in_child(by_spread_experts, model, cases, SPREAD | options, env=environment)
        return answer

    with ThreadPoolExecutor(2) as pool:
        (first, noted), (second, noted_too) = pool.map(rank, (0, 1))
    assert halves([*noted, *noted_too])
    # All rows of both ranks come to the experts of each.
    assert noted[0]["rows"] == noted_too[0]["rows"]
    assert_equal(model, [*first, *second], [*alone, *alone[:: len(CASES)]])
