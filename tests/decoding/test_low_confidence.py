"""LowConfidence against a loop-and-list reference, exactly, and its properties."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from vllm_dllm.decoding import Canvas, LowConfidence, StepContext
from vllm_dllm.ops.row_stats import RowStatistics

MASK = 99
RULE = LowConfidence()
# Few values, so that ties and probabilities equal to the threshold are common.
PROBABILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Canvas, StepContext]:
    slots, length = draw(st.integers(1, 4)), draw(st.integers(1, 12))

    def matrix(values: st.SearchStrategy, dtype: torch.dtype) -> torch.Tensor:
        row = st.lists(values, min_size=length, max_size=length)
        return torch.tensor(draw(st.lists(row, min_size=slots, max_size=slots)), dtype=dtype)

    state = matrix(st.sampled_from(["fixed", "masked", "decided"]).map(
        lambda s: ("fixed", "masked", "decided").index(s)), torch.int64)  # fmt: skip
    masked = state == 1
    tokens = torch.where(masked, MASK, matrix(st.integers(0, 9), torch.int64))
    statistics = RowStatistics(
        matrix(st.integers(10, 19), torch.int64),
        matrix(st.sampled_from(PROBABILITIES), torch.float32),
    )
    threshold = draw(
        st.lists(st.sampled_from((0.0, 0.25, 0.5, 1.01)), min_size=slots, max_size=slots)
    )
    last = draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    context = StepContext(statistics, torch.tensor(last), {"threshold": torch.tensor(threshold)})
    return Canvas(tokens, masked, state == 0), context


def reference(canvas: Canvas, context: StepContext) -> tuple[list[list[int]], list[list[bool]]]:
    tokens, masked = canvas.tokens.tolist(), canvas.masked.tolist()
    for n, threshold in enumerate(context.parameters["threshold"].tolist()):
        p, x = context.statistics.probability[n].tolist(), context.statistics.token[n].tolist()
        candidates = [i for i in range(len(p)) if masked[n][i]]
        chosen = [i for i in candidates if p[i] > threshold]
        if not chosen and candidates:
            chosen = [max(candidates, key=lambda i: (p[i], -i))]
        for i in candidates if context.last[n] else chosen:
            tokens[n][i], masked[n][i] = x[i], False
    return tokens, masked


@given(situations())
def test_equals_the_loop(situation: tuple[Canvas, StepContext]) -> None:
    canvas, context = situation
    update = RULE.step(canvas, context)
    after = update.canvas
    assert update.done.tolist() == [not any(row) for row in after.masked.tolist()]
    assert (after.tokens.tolist(), after.masked.tolist()) == reference(canvas, context)


@given(situations())
def test_decided_positions_never_move_and_masks_only_go(
    situation: tuple[Canvas, StepContext],
) -> None:
    canvas, context = situation
    before = canvas.tokens.clone()
    after = RULE.step(canvas, context).canvas
    assert torch.equal(after.tokens[~canvas.masked], before[~canvas.masked])
    assert not (after.masked & ~canvas.masked).any()
    assert torch.equal(after.fixed, canvas.fixed)
    assert torch.equal(canvas.tokens, before), "the input was written to"


@given(situations())
def test_every_step_makes_progress(situation: tuple[Canvas, StepContext]) -> None:
    canvas, context = situation
    after = RULE.step(canvas, context).canvas
    open_before, open_after = canvas.masked.sum(1), after.masked.sum(1)
    assert ((open_after < open_before) | (open_before == 0)).all()
    assert (open_after[context.last] == 0).all()


@given(situations(), st.randoms(use_true_random=False))
def test_order_of_slots_does_not_matter(situation: tuple[Canvas, StepContext], random) -> None:
    canvas, context = situation
    order = list(range(len(canvas.tokens)))
    random.shuffle(order)
    shuffled = RULE.step(
        Canvas(canvas.tokens[order], canvas.masked[order], canvas.fixed[order]),
        StepContext(
            RowStatistics(context.statistics.token[order], context.statistics.probability[order]),
            context.last[order],
            {"threshold": context.parameters["threshold"][order]},
        ),
    )
    straight = RULE.step(canvas, context).canvas
    assert torch.equal(shuffled.canvas.tokens, straight.tokens[order])


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
