"""EntropyBound against a loop-and-list reference, exactly, its schedule, and its properties."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.masked_references import fresh_state
from vllm_dllm.decoding import Canvas, StepContext
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.ops.statistics.rows import SampledStatistics

RULE = EntropyBound()
# Exact in binary, so that sums and comparisons with the bound are, too.
ENTROPIES = (0.0, 0.125, 0.25, 0.5, 1.0)


def situation(seed: int) -> tuple[Canvas, StepContext]:
    g = torch.Generator().manual_seed(seed)
    slots, length = (int(torch.randint(1, most, (1,), generator=g)) for most in (5, 11))

    def pick(values: tuple[float, ...], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=g)]

    def whole(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=g)

    argmax, sample, noise, pinned = (n + whole(3, slots, length) for n in (0, 100, 200, 300))
    ones, repeated = torch.ones(slots, length), whole(2, slots) == 1
    width = 1 + whole(length, slots)
    context = StepContext(
        statistics=SampledStatistics(argmax, ones, sample, ones, pick(ENTROPIES, slots, length)),
        last=whole(2, slots) == 1,
        parameters={
            "entropy_bound": pick((0.125, 0.25, 0.5, 2.0), slots),
            "stability_threshold": whole(3, slots).float(),
            "confidence_threshold": pick((0.01, 0.31, 2.0), slots),  # no mean of these entropies
        },
        state={
            "argmax": torch.where(repeated[:, None], argmax, whole(3, slots, length)),
            "unchanged": whole(3, slots).int(),
        },
        noise=noise,
        present=torch.arange(length) < width[:, None] if seed % 2 else None,
    )
    masked = torch.zeros(slots, length, dtype=torch.bool)
    return Canvas(pinned, masked, whole(5, slots, length) == 0), context


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


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_equals_the_loop(seed: int) -> None:
    """Slot by slot, whatever stands beside it."""
    canvas, context = situation(seed)
    update = RULE.step(canvas, context)
    tokens, done, unchanged = reference(canvas, context)
    assert update.canvas.tokens.tolist() == tokens
    assert torch.equal(update.canvas.fixed, canvas.fixed)
    assert update.done.tolist() == done
    assert update.state["unchanged"].tolist() == unchanged
    kept = update.state["argmax"] == context.statistics.token
    assert (kept if context.present is None else kept | ~context.present).all()


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
    canvas, context = situation(0)
    context.statistics.token.zero_()
    fresh = replace(context, state=fresh_state(RULE, *canvas.tokens.shape))
    assert not RULE.step(canvas, fresh).state["unchanged"].any()
