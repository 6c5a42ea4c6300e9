"""The automata that canvases follow: a whole constraint, or the part of it that is near."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import (
    END_OF_TEXT,
    NO_STATE,
    START,
    Configurations,
)
from canvas_grammar.automaton.graph import DEAD, NEVER, fewest_steps
from canvas_grammar.automaton.pushdown import pushdown_tables
from canvas_grammar.automaton.rule_automata import rule_automata
from canvas_grammar.automaton.windows import TokenAutomaton, window
from canvas_grammar.grammar.language import Node, literal, sequence
from canvas_grammar.grammar.rules import Call, Rule
from canvas_grammar.limits import CompileLimits, ConstraintError
from canvas_grammar_support.helpers import (
    END,
    LIMITS,
    automaton,
    compiled,
    letters,
    pieces,
)
from test_configurations import ALL
from test_configurations import compiled as configurations_of

CONSTRAINTS: list[tuple[str, Any]] = [
    ("regex", "(a|b)*abc?"),
    ("regex", "[a-c]{2,5}|1*2"),
    ("regex", r"\w+é?"),
    ("choice", ["a", "ab", "abc", ""]),
]


def check_edges(found: TokenAutomaton) -> None:
    """A class leads to one state, no state is a dead end, and only the end is after the end."""
    order = np.lexsort((found.edge_target, found.edge_source))
    np.testing.assert_array_equal(order, np.arange(len(order)))
    seen = set()
    edges = zip(found.edge_source, found.edge_target, found.edge_label, strict=True)
    for source, target, label in edges:
        members = found.members[found.label_first[label] : found.label_first[label + 1]].tolist()
        assert members and members == sorted(members)
        assert not seen & {(source, kind) for kind in members}
        seen |= {(source, kind) for kind in members}
        assert ((found.classes - 1) in members) == (target == found.states - 1)
    end = found.states - 1
    assert {kind for source, kind in seen if source == end} == {found.classes - 1}


@pytest.mark.parametrize(("kind", "value"), CONSTRAINTS)
def test_a_whole_constraint(kind: str, value: Any) -> None:
    found = automaton(kind, value, pieces())
    check_edges(found)
    assert set(found.edge_source.tolist()) == set(range(found.states)), "no state is a dead end"
    # Distances are the fewest tokens.
    expected: np.ndarray = np.full(found.states, 10**6)
    expected[-1] = 0
    for _ in range(found.states):
        np.minimum.at(expected, found.edge_source, expected[found.edge_target] + 1)
    np.testing.assert_array_equal(found.distance, expected)
    assert compiled(kind, value, pieces()).facts.minimum == expected[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("length", "most"), [(4, 5), (8, 12), (3, 40)])
def test_a_part_of_a_constraint(name: str, length: int, most: int) -> None:
    """Whatever is left out: what is there is right, and the shortest way to the end is there."""
    found = configurations_of(ALL[name], depth=8)
    rng = np.random.default_rng(0)
    first = START
    for _ in range(6):
        part = window(found, first, length, most)
        check_edges(part.automaton)
        states = part.states.tolist()
        assert states[0] == first and states[-1] == END_OF_TEXT
        sources, targets = part.automaton.edge_source, part.automaton.edge_target
        for source in range(len(states)):
            for token in range(len(found.tables.class_of_token)):
                there = part.automaton.after(source, token)
                right = found.after(states[source], token)
                assert right == (right if there == DEAD else states[there])
        goal: np.ndarray = np.arange(len(states)) == len(states) - 1
        steps = fewest_steps(sources, targets, goal)
        distance = found.distance[first]
        assert steps[0] <= distance or (distance > length and steps[0] == NEVER)
        from_first = fewest_steps(targets, sources, np.arange(len(states)) == 0)
        inside = from_first[:-1] if not part.whole else from_first[:0]
        assert (inside <= length).all(), "no state that the canvas cannot reach"
        first = states[int(rng.choice(targets[sources == 0]))]


def test_a_window_of_endlessly_many_states() -> None:
    found = configurations_of(ALL["nested"], depth=1000)
    part = window(found, START, 16, 20)
    assert not part.whole and len(part.states) <= 21
    assert window(configurations_of(ALL["nested"], depth=5), START, 16, 200).whole


def after(found: CompiledConstraint, *tokens: int) -> int:
    return functools.reduce(found.configurations().after, tokens, START)


def test_only_the_empty_text() -> None:
    found = automaton("choice", [""])
    assert (found.states, found.classes, int(found.distance[0])) == (2, 1, 1)
    assert after(compiled("choice", [""]), END, END) == END_OF_TEXT


def test_the_budget() -> None:
    """The token that ends the text is one of those that `max_tokens` counts."""
    found = compiled("regex", "a{6}")  # aa aa aa, and the end
    assert found.facts.minimum == 4
    found.require(4)
    with pytest.raises(ConstraintError, match=r"at least 4 tokens .* but only 3 may be generated"):
        found.require(3)
    assert compiled("choice", ["abc", "1"]).facts.minimum == 2


def test_words_that_the_tokens_cannot_write() -> None:
    with pytest.raises(ConstraintError, match="written with this tokenizer"):
        automaton("regex", "x+")
    # Only what can be finished is offered: b may stand, but not before an x.
    found = compiled("regex", "b(x|a)|bbx")
    assert after(found, 2) != NO_STATE
    assert after(found, 2, 2) == NO_STATE


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (CompileLimits(cells=30), "pairs of a state and a kind"),
        (CompileLimits(byte_states=5), "states over bytes"),
        (CompileLimits(positions=8), "10 byte positions, at most 8"),
    ],
)
def test_too_large(limits: CompileLimits, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        compiled("regex", "[ab]{9}", letters(), limits)


def test_a_text_that_must_nest_deeper_than_allowed() -> None:
    inner: Node = literal("c")
    for name in "xyz":
        inner = Call(Rule(name, sequence(literal("a"), inner, literal("b"))))
    tables = pushdown_tables(rule_automata(inner, LIMITS), letters(), LIMITS)
    assert Configurations(tables, 2).distance[START] == 7  # aa a c b b b, and the end
    with pytest.raises(ConstraintError, match="nests deeper than 1 calls"):
        Configurations(tables, 1)
