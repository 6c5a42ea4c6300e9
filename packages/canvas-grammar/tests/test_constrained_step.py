"""Denoising under a constraint: every output parses, validates and ends within its budget."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
import torch
from canvas_grammar.automaton.graph import DEAD
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.tables import Column
from canvas_grammar_support.chi_square import chi_square, limit
from canvas_grammar_support.every_path import target_of_class
from canvas_grammar_support.helpers import (
    END,
    automaton,
    compiled,
    letters,
    pieces,
    record,
    text_of,
    together,
    window,
)
from canvas_grammar_support.joined import FORMS, best, best_tokens, drawn_tokens, joined
from canvas_grammar_support.noise import row_keys
from canvas_grammar_support.simulation import Masked, Run

PERSON = record(
    name={"type": "string", "minLength": 1, "maxLength": 12},
    age={"type": "integer", "minimum": 0, "maximum": 150},
    email={"type": "string", "format": "email"},
    role={"enum": ["admin", "user", None]},
)
CASES: list[tuple[str, Any]] = [
    ("choice", ["yes", "no", "maybe", "not at all"]),
    ("regex", r"(?a)\d{4}-\d\d-\d\d"),
    ("regex", r"[a-z]+( [a-z]+)*\."),
    ("regex", r"(é|日|\w){3,}"),
    ("json_schema", PERSON),
    ("json_schema", {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 2}),
    ("json_schema", {"type": "object", "additionalProperties": {"type": "string"}}),
    ("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        "v": {"type": "boolean"}, "n": {"$ref": "#/$defs/n"}}, "required": ["v"]}}}),
]  # fmt: skip


def check(kind: str, value: Any, text: str) -> None:
    if kind == "choice":
        assert text in value
    elif kind == "regex":
        assert re.fullmatch(value, text), text
    else:
        checker = jsonschema.FormatChecker(["email"])
        validator = jsonschema.Draft202012Validator(value, format_checker=checker)
        validator.validate(json.loads(text))


@pytest.mark.parametrize(("kind", "value"), CASES)
@pytest.mark.parametrize("slack", [0, 1, 7, 40])
def test_every_output_is_valid_and_finished(kind: str, value: Any, slack: int) -> None:
    known = pieces()
    found = compiled(kind, value, known)
    budget = found.minimum + slack
    for seed in range(8):
        run = Run(
            budget,
            seed,
            length=[8, 5, 16][seed % 3],
            tail=[0, 3, 4][seed % 3],
            sampled=seed % 2 == 1,
            edits=seed in (2, 5),
            own=seed in (3, 6),
        )
        ids = Masked(found, len(known), run).text()
        assert len(ids) <= budget, run
        assert ids[-1] == END, f"{run}: not finished"
        check(kind, value, text_of(known, ids).decode())


NESTED: dict[str, tuple[str, Any]] = {
    "any JSON": ("json_schema", {}),
    "any object": ("json_schema", {"type": "object"}),
    "arrays": ("json_schema", {"type": "array", "items": {"$ref": "#"}}),
    "a tree": ("json_schema", record(
        name={"enum": ["a", "leaf"]}, children={"type": "array", "items": {"$ref": "#"}})),
    "two that call each other": ("json_schema", {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": ["integer", "array"], "items": {"$ref": "#/$defs/b"}},
            "b": {**record(a={"$ref": "#/$defs/a"}), "additionalProperties": False},
        },
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("most", [3, 20, 100])
@pytest.mark.parametrize("slack", [0, 1, 7, 60])
def test_a_constraint_that_is_decoded_in_parts(name: str, most: int, slack: int) -> None:
    """Each canvas follows the window that begins where the output is, however small windows are."""
    kind, value = NESTED[name]
    known = pieces()
    found = compiled(kind, value, known)
    budget = found.minimum + slack
    canvases = 0
    for seed in range(6):
        run = Run(
            budget,
            seed,
            length=[8, 3, 16][seed % 3],
            tail=[0, 2, 5][seed % 3],
            sampled=seed % 2 == 1,
            edits=seed in (2, 5),
            own=seed in (3, 4),
            most=most,
        )
        masked = Masked(found, len(known), run)
        ids = masked.text()
        assert not masked.windows[0].whole
        canvases += len(masked.windows)
        assert len(ids) <= budget, run
        assert ids[-1] == END, f"{run}: not finished"
        check(kind, value, text_of(known, ids).decode())
    assert slack < 60 or canvases > 6, "some take several canvases"


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_of_the_best_path_are_the_best_of_their_classes(form: str) -> None:
    known, found = letters(), automaton("regex", "[abc]{2}(1|2)")
    constraint = joined(found)
    logits = torch.zeros(1, 5, len(known))
    logits[0, 0, 3], logits[0, 1, 2], logits[0, 2, 11] = 2, 1, 1  # c, b, 2
    logits[0, 0, 9], logits[0, 2, 1] = 5, 2  # which are not allowed
    chosen = best_tokens(constraint, logits, window(5, 9), form)
    assert text_of(known, chosen.token[0].tolist()) == b"cb2"
    assert chosen.token[0].tolist() == [3, 2, 11, END, END]
    assert chosen.margin[0].tolist() == [-3, 0, -1, 0, 0]
    assert chosen.feasible.tolist() == [True]


def after_the_end(length: int) -> torch.Tensor:
    """Logits ``[1, L, ids]`` of a model that writes "ab", the end, and then the letter c."""
    logits = torch.zeros(1, length, len(letters()))
    for position, token in enumerate([1, 2, END, *[3] * (length - 3)]):
        logits[0, position, token] = 9
    logits[0, 3:, END] = -9
    return logits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [3, 4, 12])
def test_what_a_model_writes_after_the_end_makes_no_text_longer(length: int, form: str) -> None:
    logits, constraint = after_the_end(length), joined(automaton("regex", "[a-c]+"))
    chosen = best_tokens(constraint, logits, window(length, 20), form)
    assert chosen.token[0].tolist() == [1, 2, *[END] * (length - 2)]
    assert chosen.after_end[0].tolist() == [False] * 3 + [True] * (length - 3)
    short = best_tokens(constraint, logits, window(length, 3), form)
    assert not short.after_end.any(), "after the budget is no position"
    forced = best_tokens(constraint, logits, window(length, 20, forced=[-1, -1, 3]), form)
    assert forced.token[0, :3].tolist() == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize(("pattern", "wide"), [("(a|b)+", False), ("[a-c1]+", True)])
def test_a_drawn_text_is_as_likely_as_among_free_draws_that_satisfy_the_constraint(
    pattern: str, wide: bool
) -> None:
    """The text up to the first end, whatever is drawn after it; also with a wide class."""
    count, length = 20_000, 3
    known = letters()
    allowed = [n for n in range(len(known)) if re.fullmatch(pattern, text_of(known, [n]).decode())]
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, length, len(letters()), generator=generator)
    logits[0, 2, END] -= 3
    found = automaton("regex", pattern)
    every: dict[tuple[int, ...], float] = {}
    log = logits[0].log_softmax(-1)
    for size in range(1, length):
        for ids in itertools.product(allowed, repeat=size):
            chances = [log[place, token] for place, token in enumerate([*ids, END])]
            every[(*ids, *[END] * (length - size))] = float(sum(chances).exp())
    many = together([window(length, length)] * count)
    keys = row_keys(torch.arange(count)[:, None], torch.arange(length))
    constraint = joined(*[found] * count)
    assert (constraint.classes[0][Column.WIDE] >= 0) == wide
    drawn = drawn_tokens(constraint, logits.expand(count, -1, -1), many, keys)
    order = {row: number for number, row in enumerate(every)}
    numbers = torch.tensor([order[tuple(row)] for row in drawn.token.tolist()])
    probability = torch.tensor(list(every.values()), dtype=torch.float64)
    assert chi_square(numbers, probability / probability.sum()) < limit(len(every))


@pytest.mark.parametrize("form", FORMS)
def test_sureness_is_the_models_probability(form: str) -> None:
    constraint = joined(automaton("regex", "[abc]{3}"))
    logits = torch.randn(1, 6, len(letters()), generator=torch.Generator().manual_seed(1))
    chosen = best_tokens(constraint, logits, window(6, 4, first=1), form)
    expected = logits.softmax(-1).gather(2, chosen.token[..., None])[..., 0]
    expected[0, [0, 5]] = 1
    torch.testing.assert_close(chosen.probability(logits.softmax(-1).amax(-1)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_outside_of_the_window(form: str) -> None:
    """Before it stands what stood there, after it the end."""
    found = automaton("choice", ["ab"])
    constraint = joined(found)
    logits = torch.randn(1, 6, len(letters()))
    some = window(6, 2, first=2, forced=[9, 13, 4])
    chosen = best_tokens(constraint, logits, some, form)
    assert chosen.token[0].tolist() == [9, 13, 4, END, END, END]
    assert chosen.inside[0].tolist() == [False, False, True, True, False, False]
    margin = logits[0].gather(1, chosen.token[0, :, None])[:, 0] - logits[0].amax(-1)
    assert torch.equal(chosen.margin[0], margin)
    other = best_tokens(constraint, logits, window(6, 9, first=2, forced=[0, 0, 9]), form)
    assert not other.feasible
    assert other.states[0].tolist() == [0] * 7


@pytest.mark.parametrize("form", FORMS)
def test_forced_tokens_are_themselves(form: str) -> None:
    """Not the best of their class."""
    found = automaton("regex", "[abc]{3}")
    constraint = joined(found)
    logits = torch.zeros(1, 4, len(letters()))
    logits[..., 1] = 9
    some = window(4, 4, forced=[-1, 3])
    chosen = best_tokens(constraint, logits, some, form)
    assert chosen.token[0].tolist() == [1, 3, 1, END]
    drawn = drawn_tokens(constraint, logits, some, torch.arange(4)[None], form)
    assert drawn.token[0, 1] == 3
    assert text_of(letters(), drawn.token[0].tolist())[1:2] == b"c"


@pytest.mark.parametrize("form", FORMS)
def test_the_likelier_of_several_ends(form: str) -> None:
    known = Vocabulary.from_tokens([b"", b"a", b""], [0, 2])
    constraint = joined(automaton("regex", "a", known))
    logits = torch.tensor([[[0.0, 9, 0], [1, 9, 2], [2, 9, 1]]])
    chosen = best_tokens(constraint, logits, window(3, 3), form)
    assert chosen.token.tolist() == [[1, 2, 0]]
    drawn = drawn_tokens(constraint, logits, window(3, 3), torch.arange(3)[None], form)
    assert drawn.token[0, 0] == 1
    assert set(drawn.token[0, 1:].tolist()) <= {0, 2}


SHORT = {
    **record(age={"type": "integer", "minimum": 0, "maximum": 150}, role={"enum": ["user", None]}),
    "additionalProperties": False,
}


def naive_run(found: TokenAutomaton, seed: int) -> bool:
    """Left to right with a mask at each position, and no look at the rest: does it dead-end?"""
    generator = torch.Generator().manual_seed(seed)
    state, target = 0, target_of_class(found)
    for _ in range(int(found.distance[0]) + 2):
        weights = torch.randn(found.classes, generator=generator)
        weights[torch.from_numpy(target[state]) == DEAD] = -torch.inf
        state = int(target[state, int(weights.argmax())])
        if state == found.states - 1:
            return False
    return True


def test_a_mask_from_left_to_right_would_not_be_enough() -> None:
    """Why paths are planned: following the automaton alone runs out of budget."""
    found = automaton("json_schema", SHORT, pieces())
    assert sum(naive_run(found, seed) for seed in range(20)) > 10
    budget = int(found.distance[0]) + 2
    weights = torch.randn(1, budget, found.classes + 1)
    paths = best(joined(found), weights, window(budget, budget))
    assert paths.feasible[0]
    assert int(paths.states[0, -1]) == found.states - 1
