"""Answers of engines with our kernels, in Triton's interpreter, printed as JSON.

    python -m tests.support.children.kernel_child '[{"model": ..., "block": ..., "options": {...},
                                           "prompts": [...], "requests": [{...}, ...]}, ...]'

One line for each job: the tokens of each prompt, the attention rule, whether the readout has
Triton kernels, and each kernel's launches.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

KERNELS = {
    "attention": ("attention.launch_triton", "paged_attention"),
    "head": ("statistics.rows_triton", "head_statistics"),
    "rows": ("statistics.rows_triton", "logits_statistics"),
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


def count_launches() -> None:
    for name, (module, attribute) in KERNELS.items():
        owner = importlib.import_module(f"vllm_dllm.ops.{module}")
        setattr(owner, attribute, Counted(name, getattr(owner, attribute)))


def keep_our_backend() -> None:
    """Let ``--attention-backend CUSTOM`` be: vLLM's CPU platform replaces it by its own."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours, platform = AttentionBackendEnum.CUSTOM, type(current_platform)
    replaced = platform.get_attn_backend_cls

    def chosen(selected: Any, *args: Any, **kwargs: Any) -> str:
        return ours.get_path() if selected is ours else replaced(selected, *args, **kwargs)

    platform.get_attn_backend_cls = staticmethod(chosen)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    from tests.support.engine import engine

    params = [SamplingParams(**request) for request in job["requests"]]
    with engine(Path(job["model"]), job["block"], **job["options"]) as running:
        answers = running.generate(job["prompts"], params)
        state = running.runner.model_state
        rule, triton = type(state.attention).__name__, state.readout.triton
    return {"tokens": [tokens for tokens, _ in answers], "rule": rule, "triton": triton}


if __name__ == "__main__":
    # vLLM's settings are read before its first import.
    import tests.support.engine  # noqa: F401

    count_launches()
    keep_our_backend()
    for job in json.loads(sys.argv[1]):
        LAUNCHED.clear()
        print(json.dumps(answer(job) | {"launched": LAUNCHED}), flush=True)
