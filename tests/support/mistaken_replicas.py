"""Mistakes in options of replicas and of spread experts, rows of `test_start_up.py`."""

from __future__ import annotations

from tests.support.mistakes import EVERY, Mistake

SPREAD = {"enable_expert_parallel": True}
REPLICAS = [
    Mistake(
        ("LLaDA2", "DiffusionGemma"),
        {"tensor_parallel_size": 2, **SPREAD},
        "--enable-expert-parallel: on the CPU vLLM's experts cannot be spread over ranks",
        "remove it (each rank then has a part of every expert)",
    ),
    Mistake(
        ("LLaDA2", "DiffusionGemma"),
        {"data_parallel_size": 2, **SPREAD},
        "--enable-expert-parallel",
        "remove it",
    ),
    Mistake(
        EVERY,
        {"data_parallel_size": 2, **SPREAD, "enable_eplb": True},
        "Expert parallelism load balancing",
        "only supported on CUDA",
        vllm=True,
    ),
    Mistake(
        ("SDAR",),
        {
            "data_parallel_size": 2,
            "data_parallel_size_local": 1,
            "data_parallel_hybrid_lb": True,
        },
        "--data-parallel-hybrid-lb: with one rank on a node",
        "start independent servers",
    ),
    Mistake(
        ("SDAR",),
        {"data_parallel_size": 2, "data_parallel_rank": 0},
        "external data parallel mode",
        "launch independent vLLM instances",
        vllm=True,
    ),
]
