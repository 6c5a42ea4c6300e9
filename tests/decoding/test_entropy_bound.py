"""EntropyBound against a loop-and-list reference, exactly, its schedule, and its properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.decoding import Canvas, StepContext
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.ops.statistics.rows import SampledStatistics

RULE = EntropyBound()
# Exact in binary, so that sums and comparisons with the bound are, too.
ENTROPIES = (0.0, 0.125, 0.25, 0.5, 1.0)
LISTS = {"argmax": 0, "sample": 100, "noise": 200, "pin": 300}


@st.composite
def situations(draw: st.DrawFn) -> tuple[Canvas, StepContext]:
    slots, length = draw(st.integers(1, 4)), draw(st.integers(1, 10))

    def matrix(values: st.SearchStrategy, dtype: torch.dtype) -> torch.Tensor:
        row = st.lists(values, min_size=length, max_size=length)
        return torch.tensor(draw(st.lists(row, min_size=slots, max_size=slots)), dtype=dtype)

    def vector(values: st.SearchStrategy, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(draw(st.lists(values, min_size=slots, max_size=slots)), dtype=dtype)

    def tokens(kind: str) -> torch.Tensor:
        return LISTS[kind] + matrix(st.integers(0, 2), torch.int64)

    argmax = tokens("argmax")
    ones = torch.ones(slots, length)
    statistics = SampledStatistics(
        argmax, ones, tokens("sample"), ones, matrix(st.sampled_from(ENTROPIES), torch.float32)
    )
    repeated = vector(st.booleans(), torch.bool)[:, None]
    width = vector(st.integers(1, length), torch.int64)
    present = torch.arange(length) < width[:, None]
    context = StepContext(
        statistics=statistics,
        last=vector(st.booleans(), torch.bool),
        parameters={
            "entropy_bound": vector(st.sampled_from((0.125, 0.25, 0.5, 2.0)), torch.float32),
            "stability_threshold": vector(st.integers(0, 2), torch.float32),
            "confidence_threshold": vector(st.sampled_from((0.01, 0.3, 2.0)), torch.float32),
        },
        state={
            "argmax": torch.where(repeated, argmax, tokens("argmax")),
            "unchanged": vector(st.integers(0, 2), torch.int32),
        },
        noise=tokens("noise"),
        present=present if draw(st.booleans()) else None,
    )
    fixed = matrix(st.integers(0, 4), torch.int64) == 0
    masked = torch.zeros(slots, length, dtype=torch.bool)
    return Canvas(tokens("pin"), masked, fixed), context


def reference(
    canvas: Canvas, context: StepContext
) -> tuple[list[list[int]], list[bool], list[int]]:
    tokens, done, unchanged = canvas.tokens.tolist(), [], []
    p = {name: value.tolist() for name, value in context.parameters.items()}
    s, old = context.statistics, context.state["argmax"].tolist()
    argmax, sample, noise = s.token.tolist(), s.sample.tolist(), context.noise.tolist()
    for n, row in enumerate(tokens):
        width = len(row) if context.present is None else sum(context.present[n].tolist())
        h = s.entropy[n].tolist()[:width]
        accepted, spent = set(), 0.0
        for i in sorted(range(width), key=lambda i: (h[i], i)):
            if spent <= p["entropy_bound"][n]:
                accepted.add(i)
            spent += h[i]
        same = argmax[n][:width] == old[n][:width]
        unchanged.append(int(context.state["unchanged"][n]) + 1 if same else 0)
        stable = unchanged[n] >= p["stability_threshold"][n]
        confident = math.fsum(h) / width < p["confidence_threshold"][n]
        done.append((stable and confident) or bool(context.last[n]))
        for i in range(len(row)):
            if not canvas.fixed[n, i]:
                new = sample[n][i] if i in accepted else noise[n][i]
                row[i] = argmax[n][i] if done[n] else new
    return tokens, done, unchanged


@given(situations())
def test_equals_the_loop(situation: tuple[Canvas, StepContext]) -> None:
    canvas, context = situation
    update = RULE.step(canvas, context)
    tokens, done, unchanged = reference(canvas, context)
    assert update.canvas.tokens.tolist() == tokens
    assert update.done.tolist() == done
    assert update.state["unchanged"].tolist() == unchanged
    assert torch.equal(update.state["argmax"], context.statistics.token)


@given(situations(), st.randoms(use_true_random=False))
def test_order_of_slots_does_not_matter(situation: tuple[Canvas, StepContext], random) -> None:
    canvas, context = situation
    order = list(range(len(canvas.tokens)))
    random.shuffle(order)

    def pick(values: dict) -> dict:
        return {name: value[order] for name, value in values.items()}

    s = context.statistics
    fields = (s.token, s.probability, s.sample, s.sample_probability, s.entropy)
    shuffled = replace(
        context,
        statistics=SampledStatistics(*(value[order] for value in fields)),
        last=context.last[order],
        parameters=pick(context.parameters),
        state=pick(context.state),
        noise=context.noise[order],
        present=None if context.present is None else context.present[order],
    )
    other = Canvas(canvas.tokens[order], canvas.masked[order], canvas.fixed[order])
    straight, mixed = RULE.step(canvas, context), RULE.step(other, shuffled)
    assert torch.equal(mixed.canvas.tokens, straight.canvas.tokens[order])
    assert torch.equal(mixed.done, straight.done[order])


@given(situations())
def test_pinned_positions_never_move(situation: tuple[Canvas, StepContext]) -> None:
    canvas, context = situation
    after = RULE.step(canvas, context).canvas
    assert torch.equal(after.tokens[canvas.fixed], canvas.tokens[canvas.fixed])
    assert torch.equal(after.fixed, canvas.fixed)


def test_schedule_runs_from_t_max_towards_t_min() -> None:
    progress = torch.arange(5, dtype=torch.int32), torch.full((5,), 4, dtype=torch.int32)
    one = torch.ones(5)
    parameters = {"t_min": 0.4 * one, "t_max": 0.8 * one}
    published = RULE.temperature(one, progress, parameters)
    # One step left of four is the last; a step past the schedule stays there.
    torch.testing.assert_close(published, torch.tensor([0.8, 0.7, 0.6, 0.5, 0.5]))
    assert (RULE.temperature(0 * one, progress, parameters) == 0).all()
    torch.testing.assert_close(RULE.temperature(2 * one, progress, parameters), 2 * published)


def test_a_canvas_is_not_stable_before_it_was_seen_twice() -> None:
    """A window that is off by one commits early and loses the first answer token."""
    one = torch.ones(1, 3)
    sure = SampledStatistics(one.long(), one, one.long(), one, 0 * one)
    parameters = {
        "entropy_bound": torch.tensor([0.1]),
        "stability_threshold": torch.tensor([1.0]),
        "confidence_threshold": torch.tensor([0.01]),
    }
    state = {
        name: torch.full((1, 3) if spec.per_position else (1,), spec.initial, dtype=spec.dtype)
        for name, spec in RULE.state.items()
    }
    canvas = Canvas(one.long(), one.bool() & False, one.bool() & False)
    done = []
    for _ in range(3):
        context = StepContext(sure, torch.tensor([False]), parameters, state, noise=one.long())
        update = RULE.step(canvas, context)
        state = update.state
        done.append(bool(update.done))
    assert done == [False, True, True]


def test_refuses_greedy_statistics() -> None:
    from vllm_dllm.ops.statistics.rows import RowStatistics

    one = torch.ones(1, 2)
    context = StepContext(RowStatistics(one.long(), one), torch.tensor([False]), {})
    with pytest.raises(TypeError, match="sampled statistics"):
        RULE.step(Canvas(one.long(), one.bool(), one.bool()), context)
