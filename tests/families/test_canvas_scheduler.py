"""How many tokens of a canvas DiffusionGemma's scheduler hands out at the end of the context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_dllm.families.anchored.scheduler import CanvasScheduler

LENGTH, CONTEXT = 32, 736


def handed_out(start: int, in_flight: int = 0, offered: int = LENGTH) -> int:
    """Tokens for a canvas that vLLM takes to begin at `start`, with as many in flight."""
    scheduler: Any = object.__new__(CanvasScheduler)
    scheduler.block_length, scheduler.max_model_len = LENGTH, CONTEXT
    request = SimpleNamespace(
        num_computed_tokens=start,
        num_tokens=700,
        num_output_placeholders=in_flight,
        sampling_params=None,
    )
    return int(scheduler._mamba_block_aligned_split(request, min(offered, CONTEXT - start)))


def test_a_canvas_is_whole_or_cut_by_the_end_of_the_context() -> None:
    assert handed_out(700) == LENGTH
    assert handed_out(704) == LENGTH
    assert handed_out(732) == 4
    assert handed_out(CONTEXT) == 0
    assert handed_out(700, offered=31) == 0


def test_a_step_in_flight_leaves_open_where_the_last_canvas_begins() -> None:
    """It begins at 732 if the step commits, and at 700 if it does not."""
    assert handed_out(732, in_flight=LENGTH) == 0
    assert handed_out(705, in_flight=LENGTH) == 0
    # Both fit.
    assert handed_out(704, in_flight=LENGTH) == LENGTH
