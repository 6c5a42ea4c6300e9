"""Every algorithm for masked models against a loop-and-list reference, and their properties."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.masked_references import MASK, REFERENCES, L, Row
from vllm_dllm.decoding import Algorithm, Canvas, StepContext
from vllm_dllm.decoding.names import algorithms
from vllm_dllm.ops.statistics.rows import EntropyStatistics, RowStatistics

# Rules that move tokens have other properties and tests of their own.
RULES = {rule.name: rule for rule in algorithms("mask") if not rule.moves}
# Few values, exact in binary, so that ties and probabilities equal to a threshold are common.
PROBABILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
ENTROPIES = (0.0, 0.125, 0.25, 0.5)
SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    "LowConfidence": {"threshold": (0.0, 0.25, 0.5, 1.01)},
    "ConfidenceThreshold": {"threshold": (0.0, 0.25, 0.5, 1.01)},
    "LinearSpec": {"threshold": (0.0, 0.25, 0.5, 1.01)},
    "FixedSteps": {"steps": (1, 3, 5, 12, 40)},
    "LowConfidenceEven": {"steps": (1, 3, 5, 12, 40)},
    "Leftmost": {"steps": (1, 3, 5, 12, 40)},
    "LowConfidenceDynamic": {"threshold": (0.0, 0.25, 0.5, 1.0), "steps": (1, 3, 5, 12, 40)},
    "LowConfidenceStatic": {"steps": (1, 3, 5, 12, 40)},
    "Sequential": {"steps": (1, 3, 5, 12, 40)},
    "SubBlocks": {"threshold": (0.0, 0.25, 0.5, 1.0), "sub_block_length": (1, 3, 4, 8, 12, 40)},
    "EntropyBounded": {"entropy_bound": (0.0, 0.125, 0.5, 3.0)},
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
    if rule.name == "Credit":
        p = torch.rand(slots, L, generator=g) * 0.98 + 0.01
    statistics = EntropyStatistics(x, p, pick(ENTROPIES, slots, L))
    state, asked = {}, None
    for name, spec in rule.state.items():
        shape = (slots, *([L] if spec.per_position else []), *spec.extra)
        state[name] = torch.full(shape, spec.initial, dtype=spec.dtype)
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


def test_every_algorithm_has_a_reference() -> None:
    assert set(REFERENCES) == set(RULES)


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_equals_the_loop(name: str, data: st.DataObject) -> None:
    canvas, context = data.draw(situations(RULES[name]))
    wanted = rows(canvas, context)
    for row, last in zip(wanted, context.last.tolist(), strict=True):
        remaining = row.open
        REFERENCES[name](row)
        if last:
            row.reveal([i for i in remaining if row.masked[i]])
    after = RULES[name].step(canvas, context).canvas
    assert after.tokens.tolist() == [row.tokens for row in wanted]
    assert after.masked.tolist() == [row.masked for row in wanted]


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_properties(name: str, data: st.DataObject) -> None:
    rule = RULES[name]
    canvas, context = data.draw(situations(rule))
    before = canvas.tokens.clone()
    update = rule.step(canvas, context)
    after = update.canvas
    assert torch.equal(canvas.tokens, before), "the input was written to"
    assert torch.equal(after.tokens[canvas.fixed], before[canvas.fixed])
    assert torch.equal(after.fixed, canvas.fixed)
    assert not (after.masked & ~canvas.masked).any(), "masks never increase"
    decided = ~canvas.masked & ~canvas.fixed
    if not rule.edits:
        assert torch.equal(after.tokens[decided], before[decided])
    fewer = after.masked.sum(1) < canvas.masked.sum(1)
    assert (fewer | ~canvas.masked.any(1)).all(), "every step decides something"
    assert not after.masked[context.last].any()
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
    shuffled = RULES[name].step(
        Canvas(canvas.tokens[index], canvas.masked[index], canvas.fixed[index]),
        StepContext(
            statistics=context.statistics.take(index),
            last=context.last[index],
            parameters={n: value[index] for n, value in context.parameters.items()},
            state={n: value[index] for n, value in context.state.items()},
            step=None if context.step is None else context.step[index],
            asked=None if context.asked is None else context.asked[index],
        ),
    )
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
    settings = rule.config(
        **{n: _typed(rule, n, values[-1]) for n, values in SETTINGS[name].items()}
    )
    parameters = {n: torch.tensor([float(v)]) for n, v in settings.values().items()}
    state = {
        key: torch.full((1, *([L] if spec.per_position else []), *spec.extra), spec.initial)
        .to(spec.dtype)
        for key, spec in rule.state.items()
    }  # fmt: skip
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


def _typed(rule: Algorithm, name: str, value: float) -> float:
    return int(value) if rule.config.ranges()[name].whole else value


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
