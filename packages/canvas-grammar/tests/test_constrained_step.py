"""Denoising under a constraint: every output parses, validates and ends within its budget."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import NO_STATE, START
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.automaton.windows import Window, window
from canvas_grammar.decoding import Session
from canvas_grammar_support.helpers import (
    END,
    LIMITS,
    automaton,
    canvas,
    compiled,
    letters,
    pieces,
    record,
    text_of,
)
from canvas_grammar_support.joined import FORMS, joined, token_paths

from vllm_dllm.ops.noise.keyed import row_keys

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


def denoised(
    found: CompiledConstraint, budget: int, seed: int, most: int = LIMITS.window_states
) -> tuple[list[int], list[Window]]:
    """An output of random logits, and the windows of about `most` states that canvases followed.

    Each step decides some positions of a masked canvas, in any order. The seed also settles how
    long canvases are, how much of the first one is the prompt's, whether tokens are drawn, and
    whether positions that are decided may change again.
    """
    length, tail = [8, 3, 16][seed % 3], [0, 2, 5][seed % 3]
    generator = torch.Generator().manual_seed(seed)
    configurations, ids = found.configurations(), len(pieces())
    output, windows, state = list[int](), list[Window](), START
    while True:
        if not (windows and windows[0].whole):
            windows.append(window(configurations, state, length, most))
        constraint = joined(windows[-1].automaton)
        place = int(np.flatnonzero(windows[-1].states == state)[0])
        left = budget - len(output)
        tokens = torch.full((1, length), ids - 1)
        masked = torch.arange(length)[None] >= tail
        fixed, step = ~masked, 0
        while masked.any():
            forced = torch.where(fixed if seed in (2, 5) else ~masked, tokens, -1)[0].tolist()
            some = canvas(length, left, state=place, first=tail, forced=forced)
            logits = torch.randn(1, length, ids, generator=generator) * 3
            keys = row_keys(torch.tensor([[seed]]), step, torch.arange(length))
            chosen = token_paths(constraint, logits, some, keys if seed % 2 else None)
            assert chosen.feasible.all()
            accept = masked & (torch.rand(1, length, generator=generator) < 0.4)
            masked = masked & ~accept
            decided = accept | (chosen.inside & ~masked & ~fixed)
            tokens, step = torch.where(decided, chosen.token, tokens), step + 1
        new = tokens[0, tail : tail + left].tolist()
        new = new[: new.index(END) + 1] if END in new else new
        output += new
        if END in new or len(output) >= budget:
            return output, windows
        # The state follows only the tokens that have been emitted.
        state, tail = functools.reduce(configurations.after, new, state), 0
        assert state != NO_STATE, "what is put out satisfies the constraint so far"


@pytest.mark.parametrize(("kind", "value"), CASES)
@pytest.mark.parametrize("slack", [0, 1, 7, 40])
def test_every_output_is_valid_and_finished(kind: str, value: Any, slack: int) -> None:
    found = compiled(kind, value, pieces())
    for seed in range(6):
        ids, _ = denoised(found, found.minimum + slack, seed)
        assert len(ids) <= found.minimum + slack and ids[-1] == END, f"seed {seed}: not finished"
        check(kind, value, text_of(pieces(), ids).decode())


NESTED: dict[str, Any] = {
    "any JSON": {},
    "any object": {"type": "object"},
    "arrays": {"type": "array", "items": {"$ref": "#"}},
    "a tree": record(
        name={"enum": ["a", "leaf"]}, children={"type": "array", "items": {"$ref": "#"}}
    ),
    "two that call each other": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": ["integer", "array"], "items": {"$ref": "#/$defs/b"}},
            "b": {**record(a={"$ref": "#/$defs/a"}), "additionalProperties": False},
        },
    },
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("most", [3, 20, 100])
@pytest.mark.parametrize("slack", [0, 1, 7, 60])
def test_a_constraint_that_is_decoded_in_parts(name: str, most: int, slack: int) -> None:
    """Each canvas follows the window that begins where the output is, however small windows are."""
    found = compiled("json_schema", NESTED[name], pieces())
    canvases = 0
    for seed in range(6):
        ids, windows = denoised(found, found.minimum + slack, seed, most)
        assert not windows[0].whole
        canvases += len(windows)
        assert len(ids) <= found.minimum + slack and ids[-1] == END, f"seed {seed}: not finished"
        check("json_schema", NESTED[name], text_of(pieces(), ids).decode())
    assert slack < 60 or canvases > 6, "some take several canvases"


@pytest.mark.parametrize("form", FORMS)
def test_sureness_is_the_models_probability(form: str) -> None:
    constraint = joined(automaton("regex", "[abc]{3}"))
    logits = torch.randn(1, 6, len(letters()), generator=torch.Generator().manual_seed(1))
    chosen = token_paths(constraint, logits, canvas(6, 4, first=1), form=form)
    expected = logits.softmax(-1).gather(2, chosen.token[..., None])[..., 0]
    expected[0, [0, 5]] = 1
    torch.testing.assert_close(chosen.probability(logits.softmax(-1).amax(-1)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_the_likelier_of_several_ends(form: str) -> None:
    known = Vocabulary.from_tokens([b"", b"a", b""], [0, 2])
    constraint = joined(automaton("regex", "a", known))
    logits = torch.tensor([[[0.0, 9, 0], [1, 9, 2], [2, 9, 1]]])
    chosen = token_paths(constraint, logits, canvas(3, 3), form=form)
    assert chosen.token.tolist() == [[1, 2, 0]]
    drawn = token_paths(constraint, logits, canvas(3, 3), torch.arange(3)[None], form=form)
    assert drawn.token[0, 0] == 1
    assert set(drawn.token[0, 1:].tolist()) <= {0, 2}


def test_a_text_of_several_canvases_ends_within_its_budget() -> None:
    """As in the README. Positions are decided from the last one on; the model would never end."""
    length = 8
    words = [text_of(letters(), [token]).decode() for token in range(len(letters()))]
    session = Session(compiled("regex", "(ab)+[0-9]", letters()), length, torch.device("cpu"))
    state, budget, tokens = START, 2 * length + 3, []
    logits = torch.zeros(length, len(words))
    logits[:, words.index("ab")] = 5.0
    while budget > 0:
        forced = torch.full((length,), -1)
        for position in reversed(range(length)):
            path = session.best_path(logits, forced, budget, state)
            assert path.feasible.all()
            forced[position] = path.token[0, position]
        tokens += forced[:budget].tolist()
        state, budget = session.after(forced[:budget].tolist(), state), budget - length
        assert state == session.after(tokens) != NO_STATE
    text = "".join(words[token] for token in tokens)
    assert re.fullmatch("(ab)+[0-9]", text)
    assert tokens[-1] == 0
    assert text.count("ab") > 2 * length, "what the model wants is followed"
    assert session.after([*tokens, words.index("a")]) == NO_STATE, "nothing follows the end"
