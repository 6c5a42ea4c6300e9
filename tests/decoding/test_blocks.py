"""Multi-block decoding: which blocks are open, and what is decided in them, by plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.masked_references import fresh_state
from vllm_dllm.decoding import Canvas, StepContext
from vllm_dllm.decoding.base import BlockLimits
from vllm_dllm.decoding.blocks import PASSES, InBlocks, open_blocks
from vllm_dllm.decoding.credit import Credit
from vllm_dllm.decoding.quota import LowConfidenceDynamic
from vllm_dllm.decoding.thresholds import LowConfidence
from vllm_dllm.ops.statistics.rows import RowStatistics

BLOCKS = st.integers(1, 5)


@st.composite
def canvases(draw: st.DrawFn) -> list[list[bool]]:
    """Which positions of a canvas are masked, block by block."""
    count, length = draw(BLOCKS), draw(st.sampled_from([1, 2, 4, 10, 20]))
    left = [draw(st.integers(0, length)) for _ in range(count)]
    return [draw(st.permutations([True] * n + [False] * (length - n))) for n in left]


def opened_by_loop(canvas: list[list[bool]], most: int, tenths: int = 1) -> list[tuple[bool, bool]]:
    """Whether each block is open, and whether one of its positions has to be decided."""
    found: list[tuple[bool, bool]] = []
    running = 0
    for n, block in enumerate(canvas):
        decided = 0 if n == 0 else canvas[n - 1].count(False)
        opened = running < most
        if n > 0:
            # In tenths, because 0.1 is no binary fraction.
            opened = opened and found[-1][0] and 10 * decided >= tenths * len(block)
        forces = opened and (running == 0 or 10 * decided >= 9 * len(block))
        found.append((opened, forces))
        running += any(block)
    return found


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.data())
def test_open_blocks(most: list[int], data: st.DataObject) -> None:
    canvas = data.draw(canvases())
    shape = len(canvas), len(canvas[0])
    others = [[[data.draw(st.booleans()) for _ in range(shape[1])] for _ in canvas] for _ in "ab"]
    batch = [canvas, *others]
    tenths = data.draw(st.sampled_from([0, 1, 5, 10]))
    opened, forces = open_blocks(torch.tensor(batch), torch.tensor(most), tenths / 10)
    for row, limit in enumerate(most):
        wanted = opened_by_loop(batch[row], limit, tenths)
        got = list(zip(opened[row].tolist(), forces[row].tolist(), strict=True))
        assert got == wanted


def step_by_loop(
    masked: list[bool],
    p: list[float],
    threshold: float,
    length: int,
    most: int,
) -> list[int]:
    """The positions that LowConfidence decides in a canvas of blocks."""
    blocks = [masked[at : at + length] for at in range(0, len(masked), length)]
    chosen = []
    for n, (opened, forces) in enumerate(opened_by_loop(blocks, most)):
        masks = [n * length + i for i, is_mask in enumerate(blocks[n]) if is_mask]
        sure = [i for i in masks if p[i] > threshold]
        if opened and masks:
            best = max(masks, key=lambda i: (p[i], -i))
            chosen += sure or ([best] if forces else [])
    return chosen


@given(st.data())
def test_a_step_of_low_confidence(data: st.DataObject) -> None:
    canvas = data.draw(canvases())
    count, length = len(canvas), len(canvas[0])
    masked = [is_mask for block in canvas for is_mask in block]
    size = len(masked)
    p = data.draw(st.lists(st.sampled_from([0.1, 0.3, 0.5, 0.9]), min_size=size, max_size=size))
    most = data.draw(st.integers(1, count))
    tokens = torch.arange(size)[None]
    before = Canvas(tokens, torch.tensor([masked]), torch.zeros(1, size, dtype=torch.bool))
    rule = InBlocks(LowConfidence(), count)
    update = rule.step(
        before,
        StepContext(
            RowStatistics(tokens + 100, torch.tensor([p])),
            last=torch.tensor([False]),
            parameters={"threshold": torch.tensor([0.5])},
            state=fresh_state(rule, 1, size),
            blocks=BlockLimits(torch.tensor([most]), torch.tensor([99])),
        ),
    )
    chosen = step_by_loop(masked, p, 0.5, length, most)
    wanted = [i + 100 if i in chosen else i for i in range(size)]
    assert update.canvas.tokens[0].tolist() == wanted
    assert update.canvas.masked[0].tolist() == [m and i not in chosen for i, m in enumerate(masked)]
    assert update.done.tolist() == [not update.canvas.masked.any()]
    forced = [forces for _, forces in opened_by_loop(canvas, most)]
    assert update.state[PASSES][0].tolist() == [int(each) for each in forced]


@pytest.mark.parametrize("name", ["LowConfidence", "LowConfidenceDynamic"])
@pytest.mark.parametrize("cap", [2, 99])
def test_one_open_block_decides_as_a_canvas_of_one(name: str, cap: int) -> None:
    """Block after block, with the same statistics, steps and cap: the same positions."""
    inner = {"LowConfidence": LowConfidence, "LowConfidenceDynamic": LowConfidenceDynamic}[name]()
    count, length, generator = 3, 4, torch.Generator().manual_seed(1)
    values = {"threshold": torch.tensor([0.8]), "steps": torch.tensor([3.0])}
    parameters = {key: values[key] for key in inner.config.ranges()}
    rule = InBlocks(inner, count)
    for _ in range(50):
        width = count * length
        masked = torch.rand(1, width, generator=generator) < 0.8
        tokens = torch.zeros(1, width, dtype=torch.int64)
        whole = Canvas(tokens, masked, torch.zeros_like(masked))
        state = fresh_state(rule, 1, width)
        for n in range(count):
            part = slice(n * length, (n + 1) * length)
            own, steps = Canvas(*(t[:, part] for t in vars(whole).values())), 0
            while own.masked.any():
                p = torch.rand(1, width, generator=generator)
                predicted = torch.randint(1, 9, (1, width), generator=generator)
                update = rule.step(
                    whole,
                    StepContext(
                        RowStatistics(predicted, p),
                        last=torch.tensor([False]),
                        parameters=parameters,
                        state=state,
                        blocks=BlockLimits(torch.tensor([1]), torch.tensor([cap])),
                    ),
                )
                whole, state = update.canvas, update.state
                alone = inner.step(
                    own,
                    StepContext(
                        RowStatistics(predicted[:, part], p[:, part]),
                        last=torch.tensor([steps + 1 >= cap]),
                        parameters=parameters,
                        step=torch.tensor([steps]),
                    ),
                )
                own, steps = alone.canvas, steps + 1
                assert torch.equal(whole.tokens[:, part], own.tokens)
                assert torch.equal(whole.masked[:, part], own.masked)
        assert update.done.tolist() == [True]


def test_closed_blocks_keep_their_state() -> None:
    """With state of each kind: rows and positions of blocks that are not open stay as they are."""
    inner = Credit()
    rule = InBlocks(inner, 2)
    state = fresh_state(rule, 1, 4)
    masked = torch.ones(1, 4, dtype=torch.bool)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    update = rule.step(
        Canvas(tokens, masked, ~masked),
        StepContext(
            RowStatistics(tokens + 5, torch.full((1, 4), 0.5)),
            last=torch.tensor([False]),
            parameters={
                name: torch.tensor([value]) for name, value in inner.config().values().items()
            },
            state=state,
            asked=torch.zeros(2, 2, 8),
            blocks=BlockLimits(torch.tensor([1]), torch.tensor([99])),
        ),
    )
    credit = update.state["credit"]
    assert credit.shape == (1, 4, 8)
    assert (credit[0, :2] > 0).any(1).all()
    assert not credit[0, 2:].any()
