"""The loop that `benchmarks/sdar.py` times decodes as the reference does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.plain_sdar import Rules, generate, load
from tests.support.reference_sdar import MASK, Reference, Rule, random_checkpoint

# Tokens of each prompt, and of its answer: they leave the batch at different times.
ASKED = ((1, 9), (3, 9), (8, 9), (10, 9), (25, 9))
MARGIN = 3e-5


@pytest.mark.parametrize(("threshold", "steps"), [(0.3, 4), (0.3, 2), (2.0, 2), (2.0, 3)])
def test_the_loop_equals_the_reference(tmp_path: Path, threshold: float, steps: int) -> None:
    """Catches padding that is seen, positions that are shifted, and a cache that is not cut."""
    path = random_checkpoint(tmp_path, experts=False, block=4)
    reference = Reference(path)
    prompts = [[(31 * n + 7 * size) % 290 for n in range(size)] for size, _ in ASKED]
    name = "LowConfidenceStatic" if threshold > 1 else "LowConfidenceDynamic"
    rule = Rule(name, threshold, steps)
    first = [reference.generate(prompt, 9, rule) for prompt in prompts]
    end = first[2].tokens[4]  # one of them ends early
    wanted = [reference.generate(prompt, 9, rule, (end,)) for prompt in prompts]
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= 4
    rules = Rules(MASK, frozenset([end]), 4, threshold, steps, 9)
    found = generate(load(path, torch.float32), prompts, rules)
    assert [found[n] for n in robust] == [wanted[n].tokens for n in robust]
    assert len(found[2]) <= 5
