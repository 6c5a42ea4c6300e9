"""Sizes of CUDA graphs: full graphs for as many canvases as there are seats, on vLLM's own code."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.startup.default_limits import capture_sizes, set_capture_sizes


def configuration(
    length: int, seats: int, budget: int, sizes: list[int] | None = None, most: int | None = None
) -> Any:
    """As much of vLLM's configuration as its sizing reads."""
    from vllm.config.compilation import CUDAGraphMode

    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_cudagraph_capture_size=most,
        cudagraph_capture_sizes=sizes,
        post_init_cudagraph_sizes=lambda: None,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        uniform_decode_query_len=1 + length,
        scheduler_config=SimpleNamespace(max_num_seqs=seats, max_num_batched_tokens=budget),
        speculative_config=None,
        performance_mode="balanced",
        num_speculative_tokens=length,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )


def graphs(config: Any, length: int) -> tuple[list[int], list[int]]:
    """Canvases of each full graph and tokens of each piecewise one, by vLLM's own code."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    VllmConfig._set_cudagraph_sizes(config)
    manager = SimpleNamespace(
        vllm_config=config,
        compilation_config=config.compilation_config,
        max_num_reqs=config.scheduler_config.max_num_seqs,
        decode_query_len=length,  # L drafts, and no token that is sampled beside them
        cudagraph_mode=config.compilation_config.cudagraph_mode,
        varlen_decode=False,
        lora_capture_cases=[0],
        _candidates={},
        _capture_descs={},
        _maybe_ubatch_twin=lambda desc: None,
    )
    CudaGraphManager._init_candidates(manager)
    descs = manager._capture_descs
    full, piecewise = descs[CUDAGraphMode.FULL], descs[CUDAGraphMode.PIECEWISE]
    assert all(desc.num_tokens == desc.num_reqs * length for desc in full)
    return sorted(d.num_reqs for d in full), sorted(d.num_tokens for d in piecewise)


@pytest.fixture(autouse=True)
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda self: True)


@pytest.mark.parametrize(
    ("length", "seats", "budget", "stock", "most"),
    [
        (32, 256, 8192, 16, 64),
        (32, 21, 8192, 16, 21),
        (256, 64, 16384, 2, 16),
        (256, 64, 2048, 2, 8),
        (8, 4, 8192, 4, 4),
    ],
)
def test_full_graphs(length: int, seats: int, budget: int, stock: int, most: int) -> None:
    before, _ = graphs(configuration(length, seats, budget), length)
    assert before[-1] == stock
    config = configuration(length, seats, budget)
    set_capture_sizes(config, length)
    after, piecewise = graphs(config, length)
    assert after[-1] == most
    assert after[:16] == list(range(1, min(most, 16) + 1))
    # No step of up to so many canvases is padded by more than a quarter of what it holds.
    assert all(above <= 1.25 * (below + 1) for below, above in itertools.pairwise(after))
    assert len(after) < 30 and len(piecewise) < 80
    # Batches with prompts keep vLLM's own sizes.
    assert {size for size in (1, 8, 64, 256, 512) if size <= 2 * seats * length} <= set(piecewise)


@pytest.mark.parametrize("given", [{"sizes": [32, 64]}, {"most": 64}])
def test_what_the_user_gave_stays(given: dict[str, Any]) -> None:
    config = configuration(32, 64, 8192, **given)
    set_capture_sizes(config, 32)
    assert graphs(config, 32)[0] == [1, 2]


def test_none_without_graphs() -> None:
    from vllm.config.compilation import CUDAGraphMode

    config = configuration(32, 64, 8192)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    set_capture_sizes(config, 32)
    assert config.compilation_config.cudagraph_capture_sizes is None
    assert capture_sizes(32, 1, 32) == [1, 2, 4, 8, 16, 24, 32]
