"""The algorithms that verify their drafts, against loops over lists, and their properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_dllm.decoding import Algorithm, Canvas, StepContext, Update
from vllm_dllm.decoding.base import DraftContext
from vllm_dllm.decoding.names import algorithms
from vllm_dllm.decoding.self_speculative import expected_length, first_run
from vllm_dllm.ops.statistics.rows import EntropyStatistics

L, MASK, VOCABULARY = 8, 99, 100
RULES = {rule.name: rule for rule in algorithms("mask") if rule.verifies_drafts}
SETTINGS = {
    "threshold": (0.5, 0.9),
    "least_span": (1, 3),
    "least_score": (-5.0, 0.0, 0.5),
    "cost": (0.0, 1.0, 3.0),
    "cost_per_sure": (0.0, 0.7),
    "entropy_weight": (0.0, 1.0, 20.0),
    "ratio_power": (0.5, 1.0, 3.0),
}
MARGIN = 1e-5


def test_the_published_example() -> None:
    """Of acceptance rates .9, .8 and .5, 1.98 positions are expected; a cost of 1 leaves .98."""
    run = torch.tensor([[False, True, True, True, False]])
    loss = -torch.tensor([[0.3, 0.9, 0.8, 0.5, 0.4]]).log()
    assert expected_length(run, loss).tolist() == pytest.approx([0.9 + 0.72 + 0.36])


@pytest.mark.parametrize(
    ("masked", "run"),
    [("0110", "0110"), ("1011", "1000"), ("0000", "0000"), ("1111", "1111"), ("0001", "0001")],
)
def test_the_first_run_of_masks(masked: str, run: str) -> None:
    found = first_run(torch.tensor([[one == "1" for one in masked]]))
    assert "".join("01"[one] for one in found[0].tolist()) == run


@st.composite
def situations(draw: st.DrawFn) -> tuple[Canvas, StepContext]:
    slots = draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    masked = torch.tensor(
        draw(st.lists(st.lists(st.booleans(), min_size=L, max_size=L), min_size=slots,
                      max_size=slots))
    )  # fmt: skip
    x = torch.randint(10, 13, (slots, L), generator=g)
    tokens = torch.where(masked, MASK, torch.randint(10, 13, (slots, L), generator=g))
    p, q, old = (torch.rand(slots, L, generator=g) * 0.98 + 0.01 for _ in range(3))
    entropy = torch.rand(slots, L, generator=g) * 2
    draft = torch.randint(10, 13, (slots, L), generator=g)
    context = StepContext(
        statistics=EntropyStatistics(x, p, entropy),
        last=torch.rand(slots, generator=g) < 0.2,
        parameters={n: pick(v, slots, g) for n, v in SETTINGS.items()},
        state={"draft": draft, "probability": old},
        asked=q.log()[..., None],
        draft=DraftContext(
            verified=(torch.rand(slots, generator=g) < 0.5) & masked.any(1),
            tokens=torch.where(masked, draft, tokens),
            chance=torch.rand(slots, L, generator=g),
            vocabulary=VOCABULARY,
        ),
    )
    return Canvas(tokens, masked, ~masked & (tokens == 10)), context


def pick(values: tuple[float, ...], count: int, g: torch.Generator) -> torch.Tensor:
    at = torch.randint(len(values), (count,), generator=g)
    return torch.tensor(values, dtype=torch.float32)[at]


def row_of(canvas: Canvas, context: StepContext, n: int) -> dict[str, Any]:
    statistics, draft = context.statistics, context.draft
    assert isinstance(statistics, EntropyStatistics) and draft is not None
    assert context.asked is not None
    tensors = {
        "tokens": canvas.tokens,
        "masked": canvas.masked,
        "x": statistics.token,
        "p": statistics.probability,
        "h": statistics.entropy,
        "draft": draft.tokens,
        "old": context.state["probability"],
        "q": context.asked[..., 0].exp(),
        "u": draft.chance,
        "last": context.last,
        "verified": draft.verified,
    }
    settings = {name: value[n].item() for name, value in context.parameters.items()}
    return {name: tensor[n].tolist() for name, tensor in tensors.items()} | settings


def s2d2(row: dict[str, Any]) -> bool:
    """Changes the row's tokens and masks; whether the next pass verifies."""
    open_ = [i for i in range(L) if row["masked"][i]]
    if not open_:
        return False
    run = [i for i in open_ if all(row["masked"][open_[0] : i + 1])]
    sure = [i for i in open_ if row["p"][i] > row["threshold"]]
    if row["verified"]:
        for i in run:
            wanted = (row["q"][i] / row["old"][i]) ** row["ratio_power"]
            assume(abs(wanted - row["u"][i]) > MARGIN)
            row["masked"][i] = False
            if row["u"][i] < min(1.0, wanted):
                row["tokens"][i] = row["draft"][i]
                continue
            row["tokens"][i] = row["x"][i]
            break
    else:
        kept, product = 0.0, 1.0
        for i in run:
            product *= math.exp(-row["entropy_weight"] * row["h"][i] / math.log(VOCABULARY))
            kept += product
        score = kept - row["cost"] - row["cost_per_sure"] * len(sure)
        assume(abs(score - row["least_score"]) > MARGIN)
        if len(run) >= row["least_span"] and score >= row["least_score"] and not row["last"]:
            return True
        for i in sure or [max(open_, key=lambda i: (row["p"][i], -i))]:
            row["masked"][i], row["tokens"][i] = False, row["x"][i]
    if row["last"]:
        for i in open_:
            if row["masked"][i]:
                row["masked"][i], row["tokens"][i] = False, row["x"][i]
    return False


def exact(row: dict[str, Any]) -> bool:
    open_ = [i for i in range(L) if row["masked"][i]]
    if row["verified"]:
        for i in open_:
            row["masked"][i], row["tokens"][i] = False, row["x"][i]
            if row["x"][i] != row["draft"][i]:
                break
    for i in open_ if row["last"] else []:
        row["masked"][i], row["tokens"][i] = False, row["x"][i]
    return any(row["masked"])


LOOPS = {"SelfSpeculative": s2d2, "SelfSpeculativeExact": exact}


def test_every_rule_has_a_loop() -> None:
    assert set(LOOPS) == set(RULES)


@pytest.mark.parametrize("name", RULES)
@given(situation=situations())
def test_equals_the_loop(name: str, situation: tuple[Canvas, StepContext]) -> None:
    canvas, context = situation
    before = canvas.tokens.clone()
    update = RULES[name].step(canvas, context)
    assert update.verify is not None and update.draft is not None
    for n in range(len(canvas.tokens)):
        row = row_of(canvas, context, n)
        verify = LOOPS[name](row)
        found = update.canvas.masked[n].tolist()
        assert found == row["masked"]
        assert update.canvas.tokens[n].tolist() == row["tokens"]
        assert bool(update.verify[n]) == verify
        assert bool(update.done[n]) == (not any(found))
    assert torch.equal(canvas.tokens, before), "the input was written to"
    assert torch.equal(update.draft, context.statistics.token)


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 2**32 - 1))
def test_terminates_within_its_cap(name: str, seed: int) -> None:
    """With a model that changes its mind in every pass, and drafts that are never accepted."""
    rule, g = RULES[name], torch.Generator().manual_seed(seed)
    fixed = torch.arange(L)[None] < torch.randint(0, L, (1,), generator=g)
    canvas = Canvas(torch.where(fixed, 5, MASK), ~fixed, fixed)
    settings = rule.config(**({"least_score": -100.0} if name == "SelfSpeculative" else {}))
    state = {
        name: torch.full((1, L), spec.initial).to(spec.dtype) for name, spec in rule.state.items()
    }
    verified, draft = torch.tensor([False]), canvas.tokens
    cap = rule.cap(L, settings)
    for step in range(cap):
        x = torch.full((1, L), 10 + step)
        p = torch.rand(1, L, generator=g) * 0.9 + 0.05
        update = follow(rule, settings, canvas, state, x, p, verified, draft, step + 1 >= cap)
        assert update.verify is not None and update.draft is not None
        fewer = update.canvas.masked.sum() < canvas.masked.sum()
        assert bool(fewer) or bool(update.verify), "nothing was decided, and nothing is verified"
        canvas, state, verified, draft = update.canvas, update.state, update.verify, update.draft
        if update.done.all():
            break
    assert update.done.all() and not canvas.masked.any()
    assert step + 1 < cap, "the cap decides nothing"


def follow(
    rule: Algorithm,
    settings: Any,
    canvas: Canvas,
    state: Any,
    x: torch.Tensor,
    p: torch.Tensor,
    verified: torch.Tensor,
    draft: torch.Tensor,
    last: bool,
) -> Update:
    """One step of one canvas, in which a drafted token is as good as impossible."""
    return rule.step(
        canvas,
        StepContext(
            EntropyStatistics(x, p, -p.log()),
            last=torch.tensor([last]),
            parameters={n: torch.tensor([float(v)]) for n, v in settings.values().items()},
            state=state,
            asked=torch.full((1, L, 1), -99.0),
            draft=DraftContext(verified, draft, torch.full((1, L), 0.5), VOCABULARY),
        ),
    )
