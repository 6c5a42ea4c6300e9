"""JointThresholdInDel against a loop over lists, the published examples, and its guarantees."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.masked_references import fresh_state
from tests.support.reference_llada22 import Block, Cell, Rule, in_del_step
from vllm_dllm.decoding import Canvas, EditTokens, StepContext
from vllm_dllm.decoding.joint_threshold_in_del import KEPT, JointThresholdInDel
from vllm_dllm.ops.statistics.rows import RankedTokens, RowStatistics

MASK, DELETE, SPLIT = 99, 20, 21
IDS = EditTokens(MASK, DELETE, SPLIT)
RULE = JointThresholdInDel()
# Few values, so that ties and probabilities equal to a threshold are common.
SURENESS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass
class Run:
    """Canvases that are decoded side by side, as tensors."""

    canvas: Canvas
    parameters: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    steps: int = 0

    @classmethod
    def of(cls, blocks: list[Block], rules: list[Rule]) -> Run:
        cells = [block.cells for block in blocks]
        names = RULE.config.ranges()
        canvas = Canvas(
            torch.tensor([[cell.token for cell in row] for row in cells]),
            torch.tensor([[cell.masked for cell in row] for row in cells]),
            torch.tensor([[cell.fixed for cell in row] for row in cells]),
        )
        parameters = {
            name: torch.tensor([float(getattr(rule, name)) for rule in rules]) for name in names
        }
        return cls(canvas, parameters, fresh_state(RULE, len(cells), len(cells[0])))

    def step(self, ranked: Any, q: Any, last: list[bool]) -> list[bool]:
        tokens, probability = torch.tensor(ranked), torch.tensor(q)
        update = RULE.step(
            self.canvas,
            StepContext(
                RowStatistics(tokens[..., 0], probability[..., 0]),
                last=torch.tensor(last),
                parameters=self.parameters,
                state=self.state,
                step=torch.full((len(last),), self.steps),
                likeliest=RankedTokens(tokens, probability),
                edit_tokens=IDS,
            ),
        )
        assert set(update.state) == set(RULE.state)
        for name, spec in RULE.state.items():
            assert update.state[name].dtype == spec.dtype
        self.canvas, self.state, self.steps = update.canvas, dict(update.state), self.steps + 1
        return update.done.tolist()


def predictions(draw: random.Random, length: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ranked tokens and their probabilities; of few ids, so that edits and loops are common."""
    tokens = [draw.sample((*range(10, 16), DELETE, SPLIT), 3) for _ in range(length)]
    return tokens, [[draw.choice(SURENESS), 0.0, 0.0] for _ in range(length)]


def decode_side_by_side(seed: int) -> None:
    """Some canvases to their end, compared after every step."""
    draw = random.Random(seed)
    length, count = draw.choice((1, 4, 9, 12)), draw.randint(1, 5)
    rules = [
        Rule(
            MASK,
            DELETE,
            SPLIT,
            threshold=draw.choice((0.0, 0.25, 0.5, 1.0)),
            edit_threshold=draw.choice((0.0, 0.5, 1.0)),
            steps=draw.choice((1, 3, length, 40)),
            max_post_edit_steps=draw.choice((0, 1, 2, 6)),
        )
        for _ in range(count)
    ]
    blocks = []
    for _ in range(count):
        # Prompts may hold the ids of edits and masks.
        tail = [draw.choice((10, DELETE, SPLIT, MASK)) for _ in range(draw.randrange(length))]
        blocks.append(Block.fresh(tail, length, MASK))
    run, done = Run.of(blocks, rules), [False] * count
    made: list[Any] = [predictions(draw, length) for _ in range(count)]
    while not all(done):
        for n in range(count):
            if draw.random() < 0.4:  # else the same again
                made[n] = predictions(draw, length)
        last = [run.steps + 1 >= rule.cap(length) for rule in rules]
        found = run.step([tokens for tokens, _ in made], [q for _, q in made], last)
        for n, block in enumerate(blocks):
            if done[n]:
                continue
            done[n] = in_del_step(block, *made[n], rules[n], last[n])
            assert run.canvas.tokens[n].tolist() == block.tokens
            assert run.canvas.masked[n].tolist() == [cell.masked for cell in block.cells]
            assert run.canvas.fixed[n].tolist() == [cell.fixed for cell in block.cells]
            assert found[n] == done[n]
            original = [cell.masked and cell.original for cell in block.cells]
            assert (run.state["original"][n] & run.canvas.masked[n]).tolist() == original
            if done[n]:
                generated = [cell.token for cell in block.cells if not cell.fixed]
                assert not {MASK, DELETE, SPLIT} & set(generated)
        assert run.steps <= max(rule.cap(length) for rule in rules)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_the_loop(seed: int) -> None:
    decode_side_by_side(seed)


def one_step(cells: str, **writes: int) -> str:
    """A step over visible cells, some of which get another token (by their letter)."""
    block = Block([Cell(ord(c), False, False, False) for c in cells], 0)
    ranked = [[writes.get(c, ord(c)), 10, 11] for c in cells]
    run = Run.of([block], [Rule(MASK, DELETE, SPLIT)])
    run.state["at_first"][:] = 6
    run.step([ranked], [[[0.9, 0.0, 0.0] for _ in cells]], [False])
    masked = [cell == MASK for cell in run.canvas.tokens[0].tolist()]
    assert run.canvas.masked[0].tolist() == masked
    return "".join("-" if t == MASK else chr(t) for t in run.canvas.tokens[0].tolist())


@pytest.mark.parametrize(
    ("writes", "after"),
    [
        ({"B": DELETE, "D": SPLIT}, "AC-DEF"),
        ({"D": SPLIT}, "ABC-DE"),
        ({"B": DELETE}, "ACDEF-"),
        ({"A": SPLIT, "F": SPLIT}, "-ABCDE"),
        (dict.fromkeys("ABCDEF", SPLIT), "-A-B-C"),
        (dict.fromkeys("ABCDEF", DELETE), "------"),
    ],
)
def test_deletes_and_inserts(writes: dict[str, int], after: str) -> None:
    """The first three are the examples of the technical report."""
    assert one_step("ABCDEF", **writes) == after


def test_the_memory_covers_the_default_cap() -> None:
    assert RULE.cap(32, RULE.config()) == 50 <= KEPT
