"""Frames of a trace, and how a terminal shows them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tests.support.viewer_traces import HOSTILE, trace
from vllm_dllm.viewer.terminal import Kind, Screen, frames, visible

# Position 0 is the prompt's; 1 is decided and then changed; 2 is decided, withdrawn and decided.
BLOCK: dict[str, Any] = {
    "start": 8,
    "width": 4,
    "given": [0],
    "passes": [
        {"kind": kind, "step": step, "engine_step": 10 + number, "milliseconds": 0}
        for number, (kind, step) in enumerate(
            [("denoise", 1), ("wait", 1), ("denoise", 2), ("denoise", 3), ("commit", 3)]
        )
    ],
    "events": [
        {"step": step, "position": position, "token": token, "probability": 0.5, "logprob": -1.0}
        for step, position, token in [
            (0, 0, 9), (1, 1, 5), (1, 2, 6), (2, 1, 7), (2, 2, None), (3, 2, 8), (3, 3, 4),
        ]
    ],
    "tokens": [9, 7, 8, 4],
}  # fmt: skip


def test_frames_follow_the_events() -> None:
    found = list(frames(BLOCK))
    assert [frame.kind for frame in found] == ["denoise", "wait", "denoise", "denoise", "commit"]
    kinds = [[kind for kind, _ in frame.cells] for frame in found]
    given, opened, now, before, edited = Kind
    assert kinds == [
        [given, now, now, opened],
        [given, before, before, opened],
        [given, edited, opened, opened],
        [given, before, now, now],
        [given, before, before, before],
    ]
    assert [token for _, token in found[-1].cells] == BLOCK["tokens"]
    assert [frame.decided for frame in found] == [2, 2, 1, 3, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_last_frame_is_the_canvas(seed: int) -> None:
    for block in trace(seed, 16, 2, 5, wait=1)["blocks"]:
        assert [token for _, token in list(frames(block))[-1].cells] == block["tokens"]


@pytest.mark.parametrize("text", HOSTILE.values())
def test_a_terminal_obeys_no_token(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert shown.isprintable()
    shown.encode()


def test_what_a_terminal_without_colours_shows() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, no_color=True, highlight=False)
    screen = Screen(console, lambda token: "" if token == 7 else f"{token}")
    screen.show(0, BLOCK)
    screen.end()
    lines = out.getvalue().splitlines()
    assert len(lines) == 12, "a line and a status for each pass, and the answer"
    assert lines[-2] == "9<7>84", "a token without a text is shown as its id"
    assert lines[-1] == "all: 5 passes, 3 tokens, 0.6 a pass"
