"""Tokens of a class act alike: every token against the plain walk of its bytes, on every state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.constraints.helpers import (
    END,
    LIMITS,
    automaton,
    letters,
    over_bytes,
    pieces,
    record,
    tiny,
    token_bytes,
)
from vllm_dllm.constraints.automaton.byte_automaton import ByteAutomaton
from vllm_dllm.constraints.automaton.distance import DEAD, NEVER, fewest_steps
from vllm_dllm.constraints.automaton.token_automaton import (
    NO_CLASS,
    TokenAutomaton,
    token_automaton,
)
from vllm_dllm.constraints.automaton.token_functions import token_functions
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

CONSTRAINTS: list[tuple[str, Any]] = [
    ("regex", "(a|b)*abc?"),
    ("regex", "[a-c]{2,5}|1*2"),
    ("regex", r"\w+é?"),
    ("choice", ["a", "ab", "abc", ""]),
    ("json_schema", record(a={"type": "string", "maxLength": 3}, b={"type": "integer"})),
    ("json_schema", {"type": "array", "items": {"type": ["null", "boolean", "string"]}}),
]


def walked(over: ByteAutomaton, token: bytes) -> np.ndarray:
    """Where a token leads from each state, a byte at a time."""
    state: np.ndarray = np.arange(len(over.next))
    for byte in token:
        state = np.where(state == DEAD, DEAD, over.next[state, byte])
    return state


@pytest.mark.parametrize("vocabulary", [letters, pieces, tiny])
@pytest.mark.parametrize(("kind", "value"), CONSTRAINTS)
def test_every_token_on_every_state_of_bytes(kind: str, value: Any, vocabulary: Any) -> None:
    over, known = over_bytes(kind, value), vocabulary()
    function_of_token, functions = token_functions(over, known, LIMITS)
    assert len(np.unique(functions, axis=0)) == len(functions), "each function once"
    for number in range(len(known)):
        token = token_bytes(known, number)
        there = functions[function_of_token[number]]
        expected = walked(over, token) if token else np.full(len(over.next), DEAD)
        np.testing.assert_array_equal(there, expected, f"token {number}: {token!r}")


@pytest.mark.parametrize(("kind", "value"), CONSTRAINTS)
def test_the_automaton_over_tokens_allows_what_the_one_over_bytes_does(
    kind: str, value: Any
) -> None:
    known = letters() if kind != "json_schema" else pieces()
    over, found = over_bytes(kind, value), automaton(kind, value, known)
    end = found.states - 1
    state_of = {0: 0}
    todo = [0]
    while todo:
        state = todo.pop()
        byte_state = state_of[state]
        assert (found.next[state, -1] == end) == bool(over.accepting[byte_state])
        assert found.next[state, -1] in (end, DEAD)
        for number in range(len(known)):
            kind_of = int(found.class_of_token[number])
            if number in known.ends:
                assert kind_of == found.classes - 1
                continue
            behind = DEAD if kind_of == NO_CLASS else int(found.next[state, kind_of])
            token = token_bytes(known, number)
            there = int(walked(over, token)[byte_state]) if token else DEAD
            if behind == DEAD:
                # With these tokens, too, every state over bytes here can be finished.
                assert there == DEAD, token
                continue
            if behind not in state_of:
                todo.append(behind)
            assert state_of.setdefault(behind, there) == there
    assert set(state_of) | {end} == set(range(found.states)), "every state is reached"
    assert found.next[end].tolist() == [DEAD] * (found.classes - 1) + [end]
    columns = np.unique(found.next, axis=1)
    assert columns.shape[1] == found.classes, "no two classes act alike"


@pytest.mark.parametrize(("kind", "value"), CONSTRAINTS)
def test_edges_and_labels_say_the_same_as_the_table(kind: str, value: Any) -> None:
    found = automaton(kind, value, pieces())
    again = np.full_like(found.next, DEAD)
    edges = zip(found.edge_source, found.edge_target, found.edge_label, strict=True)
    for source, target, label in edges:
        members = found.members[found.label_first[label] : found.label_first[label + 1]]
        assert len(members)
        assert (again[source, members] == DEAD).all()
        again[source, members] = target
    np.testing.assert_array_equal(again, found.next)
    assert (np.diff(found.edge_source) >= 0).all()
    assert set(found.edge_source.tolist()) == set(range(found.states)), "no state is a dead end"


@pytest.mark.parametrize(("kind", "value"), CONSTRAINTS)
def test_distances_are_the_fewest_tokens(kind: str, value: Any) -> None:
    found = automaton(kind, value, pieces())
    end = found.states - 1
    expected: np.ndarray = np.full(found.states, 10**6)
    expected[end] = 0
    for _ in range(found.states):
        behind = np.where(found.next == DEAD, 10**6, expected[found.next]).min(1)
        expected = np.minimum(expected, behind + 1)
    np.testing.assert_array_equal(found.distance, expected)
    assert found.minimum == expected[0]


def test_classes_are_numbered_by_their_lowest_token() -> None:
    found = automaton("regex", "[abc]{1,3}")
    first = [int(np.flatnonzero(found.class_of_token == n)[0]) for n in range(found.classes - 1)]
    assert first == sorted(first)
    assert found.class_of_token[END] == found.classes - 1


def test_only_the_empty_text() -> None:
    found = automaton("choice", [""])
    assert (found.states, found.classes, found.minimum) == (2, 1, 1)
    assert found.advance(0, np.array([END, END])) == 1


def test_the_budget() -> None:
    """The token that ends the text is one of those that `max_tokens` counts."""
    found = automaton("regex", "a{6}")  # aa aa aa, and the end
    assert found.minimum == 4
    found.require(4)
    with pytest.raises(ConstraintError, match=r"at least 4 tokens .* but only 3 may be put out"):
        found.require(3)
    assert automaton("choice", ["abc", "1"]).minimum == 2


def test_words_that_the_tokens_cannot_write() -> None:
    with pytest.raises(ConstraintError, match="written with this tokenizer"):
        automaton("regex", "x+")
    # Only what can be finished is offered: b may stand, but not before an x.
    found = automaton("regex", "b(x|a)|bbx")
    assert found.advance(0, np.array([2])) != DEAD
    assert found.advance(0, np.array([2, 2])) == DEAD


def test_advance_walks_and_dies() -> None:
    found = automaton("regex", "(ab)+c?")
    assert found.advance(0, np.array([4, 1, 2])) == found.advance(0, np.array([1, 2]))
    assert found.advance(0, np.array([4, 4, 3, END, END])) == found.states - 1
    assert found.advance(0, np.array([4, 3, 4])) == DEAD
    assert found.advance(0, np.array([END])) == DEAD
    assert found.advance(0, np.array([13])) == DEAD, "a token without bytes"


def test_several_ends() -> None:
    known = Vocabulary.of([b"", b"a", b"", b"b"], [2, 0])
    found = token_automaton(over_bytes("regex", "a*"), known, LIMITS)
    assert found.class_of_token.tolist() == [1, 0, 1, NO_CLASS]


def test_there_and_back_through_bytes() -> None:
    found = automaton("regex", "(ab)+c?")
    again = TokenAutomaton.from_bytes(found.to_bytes())
    for name in ("next", "class_of_token", "distance", "members", "edge_label"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
        assert getattr(again, name).dtype == np.int32


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (CompileLimits(cells=30), "pairs of a state and a kind"),
        (CompileLimits(edges=3), "pairs of states with"),
    ],
)
def test_too_large(limits: CompileLimits, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        token_automaton(over_bytes("regex", "[ab]{9}"), letters(), limits)


def test_fewest_steps_of_a_small_graph() -> None:
    source, target = np.array([0, 1, 2, 3, 0]), np.array([1, 2, 0, 3, 3])
    goal = np.array([False, False, True, False])
    assert fewest_steps(source, target, goal).tolist() == [2, 1, 0, NEVER]
    none = np.array([], dtype=np.int64)
    assert fewest_steps(none, none, goal).tolist() == [NEVER, NEVER, 0, NEVER]


def test_advance_in_parts_is_advance_at_once() -> None:
    """So a request that comes back is where it was, whatever its canvases were."""
    found = automaton("regex", "(a|b)*c[12]*")
    ids = np.array([1, 2, 4, 4, 3, 10, 12, END, END])
    state = 0
    for part in np.split(ids, [2, 3, 7]):
        state = found.advance(state, part)
    assert state == found.advance(0, ids) == found.states - 1
