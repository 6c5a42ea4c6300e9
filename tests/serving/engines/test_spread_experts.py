"""Experts that are spread over two ranks (``--enable-expert-parallel``) give what one rank gives.

On the CPU the option is refused, because vLLM's kernel takes no map of experts. Here plain PyTorch
takes the kernel's place, so that all that surrounds it is tried; see
`tests.support.spread_experts`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines.test_ranks import GREEDY, SAMPLED, VOCABULARY
from tests.support import reference_gemma, reference_llada2, reference_sdar
from tests.support.answers import answers
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.child import in_child
from tests.support.engine import engine, settings

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

CASES: list[dict[str, Any]] = [
    GREEDY | {"seed": 1},  # of DiffusionGemma's first canvas
    SAMPLED,
    {"temperature": 0.5, "seed": 9, "top_k": 20},
]
FEW = CASES[:1]
# Random models have near ties, which another order of summation decides otherwise. Of LLaDA2's
# answers none may differ, of the others' 15 or 20 so many.
MAY_DIFFER = {"llada2": 0, "sdar": 2, "gemma": 2}
SPREAD = {"enable_expert_parallel": True}
EXPERTS = 8


def _sdar(path: Path) -> None:
    reference_sdar.random_checkpoint(path, experts=True, block=4)


# A family, its checkpoint (LLaDA2's has groups of experts and a shared one), and options.
FAMILIES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "llada2": (lambda p: reference_llada2.random_checkpoint(p, 0, vocab_size=VOCABULARY), {}),
    "sdar": (_sdar, {"diffusion_config": {"canvas_length": 4}}),
    "gemma": (
        lambda p: reference_gemma.random_checkpoint(p, 0, vocab_size=VOCABULARY),
        TEXT_ONLY_OPTIONS,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], list[list[int]]]:
    """A checkpoint, options, and the answers of one engine with vLLM's own kernel."""
    model = tmp_path_factory.mktemp(request.param)
    make, options = FAMILIES[request.param]
    make(model)
    with engine(model, 32, **options) as running:
        return model, options, answers(running.llm, CASES)


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


Family = tuple[Path, dict[str, Any], list[list[int]]]


def assert_equal(model: Path, found: list[list[int]], alone: list[list[int]]) -> None:
    different = [n for n, pair in enumerate(zip(found, alone, strict=True)) if pair[0] != pair[1]]
    name = next(name for name in FAMILIES if model.name.startswith(name))
    assert len(different) <= MAY_DIFFER[name], different


def halves(noted: list[dict[str, Any]]) -> bool:
    """Whether each of two ranks held its own half of the experts, and computed with no others."""
    own = list(range(EXPERTS // 2))
    absent = [-1] * (EXPERTS // 2)
    return [(n["held"], n["maps"]) for n in noted] == [
        ([EXPERTS // 2], [own + absent]),
        ([EXPERTS // 2], [absent + own]),
    ]


def test_one_rank_has_all_experts(family: Family) -> None:
    """The option is allowed there, and changes nothing."""
    model, options, alone = family
    with engine(model, 32, **SPREAD, **options) as running:
        assert answers(running.llm, CASES) == alone


@pytest.mark.parametrize("family", ["llada2", "gemma"], indirect=True)
def test_tensor_parallel(family: Family) -> None:
    """Attention is split over the ranks, and experts are spread over them.

    SDAR's random model has near ties; see `test_families`, which knows them.
    """
    model, options, alone = family
    both = SPREAD | options | {"tensor_parallel_size": 2}
    ((found, noted),) = in_child(by_spread_experts, model, CASES, both)
    assert halves(noted)
    assert_equal(model, found, alone)


def test_data_parallel(family: Family) -> None:
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
        both = SPREAD | options
        (answer,) = in_child(by_spread_experts, model, cases, both, env=environment)
        return answer

    with ThreadPoolExecutor(2) as pool:
        (first, noted), (second, noted_too) = pool.map(rank, (0, 1))
    assert halves([*noted, *noted_too])
    # All rows of both ranks come to the experts of each.
    assert noted[0]["rows"] == noted_too[0]["rows"]
    assert_equal(model, [*first, *second], [*alone, *alone[:: len(CASES)]])
