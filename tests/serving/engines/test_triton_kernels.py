"""Our kernels in a real engine: the tokens of PyTorch's statistics and vLLM's attention.

They run in Triton's interpreter, in a process in which vLLM finds a Triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton_interpreter import interpreter_env

from tests.support import oracle
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.child import in_child
from tests.support.children import kernel_child
from tests.support.engine import engine
from tests.support.reference_gemma import VOCABULARY, random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Within a block, over several, and with a tail that the first canvas takes along.
LENGTHS = (5, 24, 43)


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(12, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]


def with_kernels(jobs: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    return in_child(kernel_child.answers, jobs, env=interpreter_env(directory / "triton"))


def without_kernels(job: dict[str, Any]) -> tuple[list[list[int]], str]:
    from vllm import SamplingParams

    params = [SamplingParams(**request) for request in job["requests"]]
    options = {name: value for name, value in job["options"].items() if name not in OURS}
    if "dllm" in job:
        options["additional_config"] = {"dllm": job["dllm"]}
    with engine(Path(job["model"]), job["block"], **options) as running:
        answers = running.generate(job["prompts"], params)
        rule = type(running.runner.model_state.attention).__name__
    return [tokens for tokens, _ in answers], rule


def check(job: dict[str, Any], found: dict[str, Any], rule: str, launched: set[str]) -> None:
    """The same tokens on both ways, and the kernels that were meant to run did."""
    assert found["rule"] == "MaskRules"
    assert set(found["launched"]) == launched
    assert found["triton"] == bool(launched - {"attention"})
    wanted, other = without_kernels(job)
    assert other == rule
    assert found["tokens"] == wanted


OURS = ("attention_backend", "additional_config")
OPTIONS = {
    **{"top_k": 20, "top_p": 0.9, "min_p": 0.01, "min_tokens": 4},
    **{"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2},
}


def with_ours(job: dict[str, Any], kernels: str) -> dict[str, Any]:
    dllm = {**job.get("dllm", {}), "kernels": kernels}
    ours = {"attention_backend": "CUSTOM", "additional_config": {"dllm": dllm}}
    return {**job, "options": {**job["options"], **ours}}


@pytest.mark.long
def test_llada2(tmp_path: Path) -> None:
    """Prefills of several blocks beside canvases, in chunks; float32, so tokens are equal.

    The second batch has a request that samples, with the options of rows: then rows of logits are
    what is reduced.
    """
    golden = oracle.checkpoint("ckpt_b_b8")
    common = {"ignore_eos": True, "extra_args": {"diffusion_max_steps": 3}}
    greedy = [{"temperature": 0, "max_tokens": n, **common} for n in (16, 12, 8)]
    sampled = {"temperature": 0.8, "seed": 5, "max_tokens": 8, **common, **OPTIONS}
    jobs = [
        {
            "model": str(golden.path),
            "block": golden.block_size,
            "options": {"max_num_batched_tokens": 32},
            "prompts": prompts(256)[: len(requests)],
            "requests": requests,
        }
        for requests in (greedy, [sampled, greedy[2]])
    ]
    found = with_kernels([with_ours(job, "triton") for job in jobs], tmp_path)
    check(jobs[0], found[0], "BlockCausal", {"attention", "head"})
    check(jobs[1], found[1], "BlockCausal", {"attention", "rows"})


@pytest.mark.long
def test_diffusion_gemma(tmp_path: Path) -> None:
    """Causal prompts beside canvases; both window rules, which differ beyond the window."""
    random_checkpoint(tmp_path, seed=1, canvas=32, sliding_window=16)
    steps = {"diffusion_max_steps": 3}
    jobs = [
        {
            "model": str(tmp_path),
            "block": 32,
            "options": TEXT_ONLY_OPTIONS,
            "dllm": {"window": window},
            "prompts": prompts(VOCABULARY),
            "requests": [
                {"temperature": 0, "max_tokens": n, "seed": n, "ignore_eos": True}
                | {"extra_args": steps}
                | (OPTIONS if n == 64 else {})
                for n in (64, 32, 32)
            ],
        }
        for window in ("symmetric", "reference")
    ]
    asked = [with_ours(jobs[0], "torch"), with_ours(jobs[1], "triton")]
    symmetric, reference = with_kernels(asked, tmp_path)
    check(jobs[0], symmetric, "CausalUnlessDenoised", {"attention"})
    check(jobs[1], reference, "CausalUnlessDenoised", {"attention", "rows", "weights"})
    assert symmetric["tokens"] != reference["tokens"], "the window was never reached"
