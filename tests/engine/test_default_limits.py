"""How many requests run together when nobody says: from memory, and never more than vLLM's own."""

from __future__ import annotations

import pytest

from vllm_dllm.startup.default_limits import canvas_bytes, default_seats

GIB = 1 << 30


def test_a_canvas_of_the_real_model() -> None:
    """DiffusionGemma 26B in bfloat16: 26 MB a request, where whole logits would take 268."""
    assert canvas_bytes(256, 2816, 2) == 256 * 2816 * (2 + 4 + 32)
    assert canvas_bytes(256, 2816, 2) < 0.11 * 256 * 262_144 * 4


@pytest.mark.parametrize(
    ("memory", "each", "stock", "seats"),
    [
        (141 * GIB, 27 << 20, 1024, 267),
        (141 * GIB, 27 << 20, 256, 256),
        (24 * GIB, 27 << 20, 256, 45),
        (1 << 20, 27 << 20, 256, 1),
    ],
)
def test_seats(memory: int, each: int, stock: int, seats: int) -> None:
    assert default_seats(memory, each, stock) == seats
