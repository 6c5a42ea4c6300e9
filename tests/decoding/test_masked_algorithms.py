"""Every algorithm for masked models against a loop-and-list reference, and their properties."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.masked_references import MASK, REFERENCES, L, Row, fresh_state
from vllm_dllm.decoding import Algorithm, Canvas, StepContext
from vllm_dllm.decoding.registry import algorithms
from vllm_dllm.ops.statistics.rows import EntropyStatistics, RowStatistics

# Rules that move tokens have other properties and tests of their own.
RULES = {rule.name: rule for rule in algorithms("mask") if not rule.moves}
# Few values, exact in binary, so that ties and probabilities equal to a threshold are common.
PROBABILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
ENTROPIES = (0.0, 0.125, 0.25, 0.5)
BY_THRESHOLD = ("LowConfidence", "ConfidenceThreshold", "LinearSpec")
BY_STEPS = ("FixedSteps", "LowConfidenceEven", "Leftmost", "LowConfidenceStatic", "Sequential")
STEPS = {"steps": (1, 3, 5, 12, 40)}
SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    **{name: {"threshold": (0.0, 0.25, 0.5, 1.01)} for name in BY_THRESHOLD},
    **dict.fromkeys(BY_STEPS, STEPS),
    "LowConfidenceDynamic": {"threshold": (0.0, 0.25, 0.5, 1.0)} | STEPS,
    "SubBlocks": {"threshold": (0.0, 0.25, 0.5, 1.0), "sub_block_length": (1, 3, 4, 8, 12, 40)},
    "EntropyBounded": {"entropy_bound": (0.0, 0.125, 0.5, 3.0)},
    "TokenEntropyBounded": {"entropy_bound": (0.0, 0.1, 0.4, 3.0)} | STEPS,
    "FrechetProfile": {"threshold": (0.25, 0.5, 0.75, 1.0)},
    "Hierarchical": {"threshold": (0.5, 0.9), "low": (0.0, 0.25, 0.6)},
    "EntropyBound": {"entropy_bound": (0.0, 0.125, 0.5, 3.0)},
    "JointThreshold": {
        "threshold": (0.25, 0.7),
        "edit_threshold": (0.0, 0.5, 1.0),
        "max_post_edit_steps": (0, 1, 2),
        "penalty_lambda": (0.0,),
    },
    "Credit": {"threshold": (0.55, 0.95), "alpha": (0.7, 2.0), "gamma": (0.2,), "beta": (0.8, 0.5)},
}


@st.composite
def situations(draw: st.DrawFn, rule: Algorithm) -> tuple[Canvas, StepContext]:
    slots = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    g = torch.Generator().manual_seed(seed)

    def pick(values: tuple[float, ...], *shape: int) -> torch.Tensor:
        at = torch.randint(len(values), shape, generator=g)
        return torch.tensor(values, dtype=torch.float32)[at]

    # Hypothesis shrinks towards few masks; contents come from the seed.
    kind = torch.tensor(
        draw(st.lists(st.lists(st.integers(0, 2), min_size=L, max_size=L), min_size=slots,
                      max_size=slots))
    )  # fmt: skip
    masked, fixed = kind == 1, kind == 2
    x = torch.randint(10, 14, (slots, L), generator=g)
    tokens = torch.where(masked, MASK, torch.randint(10, 14, (slots, L), generator=g))
    p = pick(PROBABILITIES, slots, L)
    if rule.name in ("Credit", "TokenEntropyBounded"):  # -p ln p of 0.5 and 0.25 is the same
        p = torch.rand(slots, L, generator=g) * 0.98 + 0.01
    statistics = EntropyStatistics(x, p, pick(ENTROPIES, slots, L))
    state, asked = fresh_state(rule, slots, L), None
    if rule.name == "JointThreshold":
        state["post_edit_steps"] = torch.randint(0, 3, (slots,), generator=g).int()
    if rule.name == "Credit":
        # Different tokens with a credit, the last of them perhaps nobody.
        order = torch.rand(slots, L, 10, generator=g).argsort(-1)[..., :8] + 10
        nobody = torch.rand(slots, L, 8, generator=g) < 0.4
        state["ids"] = torch.where(nobody, -1, order)
        state["credit"] = torch.where(nobody, 0.0, torch.rand(slots, L, 8, generator=g) * 2)
        asked = (torch.rand(slots, L, 8, generator=g) * 0.1).log()
        asked = torch.minimum(asked, p.log()[..., None])
        asked = torch.where(state["ids"] == x[..., None], p.log()[..., None], asked)
    context = StepContext(
        statistics=statistics,
        last=torch.rand(slots, generator=g) < draw(st.sampled_from((0.0, 0.5))),
        parameters={n: pick(values, slots) for n, values in SETTINGS[rule.name].items()},
        state=state,
        step=torch.randint(0, 6, (slots,), generator=g).int(),
        asked=asked,
    )
    return Canvas(tokens, masked, fixed), context


def rows(canvas: Canvas, context: StepContext) -> list[Row]:
    s = context.statistics
    assert isinstance(s, EntropyStatistics)
    return [
        Row(
            *(t[n].tolist() for t in (canvas.tokens, canvas.masked, canvas.fixed)),
            *(t[n].tolist() for t in (s.token, s.probability, s.entropy)),
            step=int(context.step[n]),
            settings={name: value[n].item() for name, value in context.parameters.items()},
            state={name: value[n].tolist() for name, value in context.state.items()},
            asked=[] if context.asked is None else context.asked[n].tolist(),
        )
        for n in range(len(canvas.tokens))
    ]


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_equals_the_loop(name: str, data: st.DataObject) -> None:
    rule = RULES[name]
    canvas, context = data.draw(situations(rule))
    before, wanted = canvas.tokens.clone(), rows(canvas, context)
    for row, last in zip(wanted, context.last.tolist(), strict=True):
        remaining = row.open
        REFERENCES[name](row)
        if last:
            row.reveal([i for i in remaining if row.masked[i]])
    update = rule.step(canvas, context)
    after = update.canvas
    assert after.tokens.tolist() == [row.tokens for row in wanted]
    assert after.masked.tolist() == [row.masked for row in wanted]
    assert torch.equal(after.fixed, canvas.fixed)
    assert torch.equal(canvas.tokens, before), "the input was written to"
    decided = ~canvas.masked & ~canvas.fixed
    assert rule.edits or torch.equal(after.tokens[decided], before[decided])
    fewer = after.masked.sum(1) < canvas.masked.sum(1)
    assert (fewer | ~canvas.masked.any(1)).all(), "every step decides something"
    assert not (after.tokens[~after.masked] == MASK).any()
    assert set(update.state) == set(rule.state)
    for key, spec in rule.state.items():
        assert update.state[key].dtype == spec.dtype


@pytest.mark.parametrize("name", RULES)
@given(data=st.data(), shuffle=st.randoms(use_true_random=False))
def test_order_of_slots_does_not_matter(name: str, data: st.DataObject, shuffle) -> None:
    canvas, context = data.draw(situations(RULES[name]))
    order = list(range(len(canvas.tokens)))
    shuffle.shuffle(order)
    index = torch.tensor(order)

    def part(of: Any) -> Any:
        """Some slots of tensors, whatever holds them."""
        if isinstance(of, dict):
            return {key: part(value) for key, value in of.items()}
        if isinstance(of, torch.Tensor) or of is None:
            return None if of is None else of[index]
        return replace(of, **{key: part(value) for key, value in vars(of).items()})

    shuffled = RULES[name].step(part(canvas), part(context))
    straight = RULES[name].step(canvas, context)
    assert torch.equal(shuffled.canvas.tokens, straight.canvas.tokens[index])
    assert torch.equal(shuffled.done, straight.done[index])
    for key, value in straight.state.items():
        assert torch.equal(shuffled.state[key], value[index])


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 2**32 - 1))
def test_terminates_within_its_cap(name: str, seed: int) -> None:
    """With a model that changes its mind at every step."""
    rule = RULES[name]
    g = torch.Generator().manual_seed(seed)
    fixed = torch.arange(L)[None] < torch.randint(0, L, (1,), generator=g)
    canvas = Canvas(torch.where(fixed, 5, MASK), ~fixed, fixed)
    ranges, last = rule.config.ranges(), {n: v[-1] for n, v in SETTINGS[name].items()}
    settings = rule.config(**{n: int(v) if ranges[n].whole else v for n, v in last.items()})
    parameters = {n: torch.tensor([float(v)]) for n, v in settings.values().items()}
    state = fresh_state(rule, 1, L)
    cap = rule.cap(L, settings)
    for step in range(cap):
        x = torch.randint(10, 90, (1, L), generator=g)
        p = torch.rand(1, L, generator=g) * 0.98 + 0.01
        asked = None if rule.ask(state) is None else torch.full((1, L, 8), -9.0)
        update = rule.step(
            canvas,
            StepContext(
                EntropyStatistics(x, p, -p.log()),
                last=torch.tensor([step + 1 >= cap]),
                parameters=parameters,
                state=state,
                step=torch.tensor([step], dtype=torch.int32),
                asked=asked,
            ),
        )
        canvas, state = update.canvas, update.state
        if update.done.all():
            break
    assert update.done.all()
    assert not canvas.masked.any()


@pytest.mark.parametrize("name", ["FixedSteps", "LowConfidenceEven", "Leftmost"])
def test_an_even_share_is_the_quota_of_the_masks_at_first(name: str) -> None:
    """``floor(m / S) + [s < m mod S]`` for every m and S; a step whose quota is 0 is skipped."""
    for masks, steps in itertools.product(range(1, L + 1), range(1, L + 4)):
        quotas = [masks // steps + (s < masks % steps) for s in range(steps)]
        masked = torch.arange(L)[None] < masks
        tokens, decided, step = torch.full((1, L), MASK), list[int](), 0
        p = torch.rand(1, L, generator=torch.Generator().manual_seed(steps))
        while masked.any():
            context = StepContext(
                RowStatistics(torch.full((1, L), 5), p),
                last=torch.tensor([False]),
                parameters={"steps": torch.tensor([float(steps)])},
                step=torch.tensor([step]),
            )
            after = RULES[name].step(Canvas(tokens, masked, ~masked), context).canvas
            decided.append(int(masked.sum() - after.masked.sum()))
            masked, step = after.masked, step + 1
        assert decided == [count for count in quotas if count], (masks, steps)


def test_penalty_takes_the_left_neighbour_alone() -> None:
    tokens = torch.tensor([[7, 8, 9]])
    none = torch.zeros(1, 3, dtype=torch.bool)
    adjusted = RULES["JointThreshold"].adjust(
        Canvas(tokens, none, none), {"penalty_lambda": torch.tensor([1.5])}
    )
    assert adjusted is not None
    ids, amount = adjusted
    assert amount.tolist() == [[0, -1.5, -1.5]]
    assert ids[0, 1:].tolist() == [7, 8]
