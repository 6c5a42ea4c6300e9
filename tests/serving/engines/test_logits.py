"""The engine's own logits against the golden rows: within 2e-4 (float32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.engine import Engine, engine, greedy

pytestmark = pytest.mark.engine

# Golden values are rounded to 5 decimals and were seen to differ by up to 6.5e-5 between
# two float32 implementations.
TOLERANCE = 2e-4


class LogitsRecorder:
    """Logits of every forward pass of the only request, with their positions."""

    def __init__(self, running: Engine) -> None:
        self.passes: list[tuple[list[int], torch.Tensor]] = []
        self.model = running.runner.model
        self.handle = self.model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module: Any, args: Any, kwargs: Any, hidden: torch.Tensor) -> None:
        positions = kwargs["positions"].tolist()
        self.passes.append((positions, self.model.head(hidden).float()))

    def row(self, of_pass: int, position: int) -> torch.Tensor:
        positions, logits = self.passes[of_pass]
        return logits[positions.index(position)]


@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("name", ["ckpt_a_b32", "ckpt_b_b8"])
def test_golden_rows(name: str, budget: int | None) -> None:
    golden = oracle.checkpoint(name)
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": budget}
    worst = 0.0
    with engine(golden.path, golden.block_size, **options) as running:
        for prompt in golden.prompts.values():
            recorder = LogitsRecorder(running)
            running.generate([prompt.tokens], [greedy(1)])
            recorder.handle.remove()
            chunks = sum(positions[-1] < len(prompt.tokens) for positions, _ in recorder.passes)
            for kind, of_pass in (("prompt_only", chunks - 1), ("first_generation_canvas", chunks)):
                golden_rows = prompt.logits[kind]
                for row, values in zip(golden_rows["rows"], golden_rows["values"], strict=True):
                    got = recorder.row(of_pass, row)
                    worst = max(worst, (got - torch.tensor(values)).abs().max().item())
    assert 0 < worst <= TOLERANCE
