"""How far the engine is from a float32 reference, in float32 and in bfloat16.

`benchmarks/fidelity.py` measures the same with more prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.engine import Engine, engine
from tests.support.fidelity import rounding_budget
from tests.support.fidelity_subjects import (
    BLOCK,
    Subject,
    answers,
    errors,
    mini_slice,
    tiny_gemma,
    tiny_llada2,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Decisions closer than this may legitimately fall differently in another summation order.
MARGIN = 3e-5
# What the slice of LLaDA2.0-mini takes: the reference's weights while the engine's are not there
# yet, then the engine's twice while they are loaded.
SLICE_BYTES = 16 << 30
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=[tiny_llada2, tiny_gemma])
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param(per_task=5)


@pytest.fixture(scope="module", params=DTYPES)
def running(subject: Subject, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine(subject.path, BLOCK, dtype=request.param, **subject.options) as started:
        yield started


def dtype_of(running: Engine) -> torch.dtype:
    return running.runner.dtype


def assert_layers_within_rounding(subject: Subject, running: Engine) -> None:
    width = subject.layers[0].shape[-1]
    for layer, error in enumerate(errors(subject, running), start=1):
        budget = rounding_budget(layer, dtype_of(running), width)
        assert max(error.median, error.logits) < budget, f"layer {layer}: {error}, {budget}"


def assert_same_answers(subject: Subject, running: Engine, least: float) -> None:
    """Answers equal the reference's, alone and batched, for at least a share of the prompts."""
    alone, batched = answers(subject, running)
    margins = subject.margins or [1.0] * len(alone)
    robust = [n for n, margin in enumerate(margins) if margin > MARGIN]
    assert len(robust) >= len(alone) * 0.8, "too many near ties to compare answers"
    for got in (alone, batched):
        equal = sum(got[n] == subject.answers[n] for n in robust)
        assert equal >= least * len(robust), f"{equal} of {len(robust)}"


def test_layers_are_within_rounding(subject: Subject, running: Engine) -> None:
    assert_layers_within_rounding(subject, running)


def test_answers(subject: Subject, running: Engine) -> None:
    """In float32 every answer is the reference's; trained models keep most of them in bfloat16."""
    assert_same_answers(subject, running, 1.0 if dtype_of(running) == torch.float32 else 0.9)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_published_widths(tmp_path: Path) -> None:
    """Two layers of LLaDA2.0-mini with random weights, whose decisions are close to each other."""
    free = available_memory()
    if free < SLICE_BYTES:
        pytest.skip(f"needs {SLICE_BYTES >> 30} GiB of memory, {free >> 30} are free")
    subject = mini_slice(tmp_path)
    for dtype in DTYPES:
        with engine(tmp_path, BLOCK, dtype=dtype) as running:
            assert_layers_within_rounding(subject, running)
            if dtype == "float32":
                assert_same_answers(subject, running, 1.0)


def available_memory() -> int:
    """Bytes that new processes may take without swapping, as the kernel estimates."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) << 10
