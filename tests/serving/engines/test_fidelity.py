"""How far the engine is from a float32 reference, in float32 and in bfloat16.

`benchmarks/fidelity.py` measures the same with more prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.engine import Engine, engine
from tests.support.fidelity import rounding_budget
from tests.support.fidelity_subjects import BLOCK, Subject, answers, errors, tiny_gemma, tiny_llada2
from tests.support.reference import MARGIN

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=[tiny_llada2, tiny_gemma])
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param(per_task=5)


@pytest.fixture(scope="module", params=DTYPES)
def running(subject: Subject, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine(subject.path, BLOCK, dtype=request.param, **subject.options) as started:
        yield started


def test_layers_are_within_rounding(subject: Subject, running: Engine) -> None:
    width = subject.layers[0].shape[-1]
    for layer, error in enumerate(errors(subject, running), start=1):
        budget = rounding_budget(layer, running.runner.dtype, width)
        assert max(error.median, error.logits) < budget, f"layer {layer}: {error}, {budget}"


def test_answers(subject: Subject, running: Engine) -> None:
    """Alone and batched: in float32 every answer is the reference's, in bfloat16 most of them."""
    least = 1.0 if running.runner.dtype == torch.float32 else 0.9
    alone, batched = answers(subject, running)
    margins = subject.margins or [1.0] * len(alone)
    robust = [n for n, margin in enumerate(margins) if margin > MARGIN]
    assert len(robust) >= len(alone) * 0.8, "too many near ties to compare answers"
    for got in (alone, batched):
        equal = sum(got[n] == subject.answers[n] for n in robust)
        assert equal >= least * len(robust), f"{equal} of {len(robust)}"
