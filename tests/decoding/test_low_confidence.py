"""LowConfidence on the golden traces, step by step."""

from __future__ import annotations

import torch

from tests.support import oracle
from vllm_dllm.decoding import Canvas, StepContext
from vllm_dllm.decoding.low_confidence import LowConfidence
from vllm_dllm.ops.statistics.rows import RowStatistics

RULE = LowConfidence()


def test_golden_steps_are_consistent() -> None:
    """Each golden step, rebuilt from what it filled and whether it fell back to the surest."""
    golden = oracle.checkpoint("ckpt_a_b32")
    steps = 0
    for case in oracle.robust_primary(golden, "low_confidence"):
        threshold, tail = case.params["threshold"], len(golden.prompts[case.prompt].tokens) % 32
        for number, block in enumerate(case.blocks):
            fixed = torch.arange(32)[None] < (tail if number == 0 else 0)
            tokens = torch.tensor(block["canvas0"])[None]
            canvas = Canvas(tokens, ~fixed, fixed)
            for step in block["steps"]:
                wanted = torch.tensor(step["canvas"])[None]
                filled = torch.zeros(1, 32).bool()
                filled[0, step["filled"]] = True
                sure = threshold * 0.9 if step["fallback"] else threshold + 0.1
                probability = torch.where(filled, sure, threshold * 0.5)
                context = StepContext(
                    RowStatistics(wanted, probability),
                    torch.tensor([False]),
                    {"threshold": torch.tensor([threshold])},
                )
                canvas = RULE.step(canvas, context).canvas
                assert canvas.tokens.tolist()[0] == step["canvas"]
                steps += 1
    assert steps > 1000
