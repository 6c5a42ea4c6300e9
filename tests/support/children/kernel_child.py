"""Answers of engines with our kernels, in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KERNELS = {
    "attention": ("attention.launch_triton", "paged_attention"),
    "head": ("statistics.rows_triton", "head_statistics"),
    "rows": ("statistics.rows_triton", "logits_statistics"),
    "write": ("statistics.scores_triton", "write_kernel"),
    "weights": ("statistics.soft_embedding_triton", "weights_kernel"),
}


class Counted:
    """A kernel or its launcher; counts its launches."""

    def __init__(self, name: str, original: Any) -> None:
        self.name, self.original = name, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        LAUNCHED[self.name] += 1
        return self.original(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Any:
        LAUNCHED[self.name] += 1
        return self.original[grid]


LAUNCHED: Counter[str] = Counter()


def keep_our_backend() -> None:
    """Let ``--attention-backend CUSTOM`` be: vLLM's CPU platform replaces it by its own."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours, platform = AttentionBackendEnum.CUSTOM, type(current_platform)
    replaced = platform.get_attn_backend_cls

    def chosen(selected: Any, *args: Any, **kwargs: Any) -> str:
        return ours.get_path() if selected is ours else replaced(selected, *args, **kwargs)

    platform.get_attn_backend_cls = staticmethod(chosen)


def answers(jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each job the tokens of each prompt, the rule, whether Triton reads, and launches."""
    # vLLM's settings are read before its first import.
    from tests.support.engine import engine

    for name, (module, attribute) in KERNELS.items():
        owner = importlib.import_module(f"vllm_dllm.ops.{module}")
        setattr(owner, attribute, Counted(name, getattr(owner, attribute)))
    keep_our_backend()
    from vllm import SamplingParams

    for job in jobs:
        LAUNCHED.clear()
        params = [SamplingParams(**request) for request in job["requests"]]
        with engine(Path(job["model"]), job["block"], **job["options"]) as running:
            found = running.generate(job["prompts"], params)
            state = running.runner.model_state
            rule, triton = type(state.attention).__name__, state.readout.triton
        tokens = [tokens for tokens, _ in found]
        yield {"tokens": tokens, "rule": rule, "triton": triton, "launched": LAUNCHED}
