"""Automata over bytes, and the two properties of outlines_core's index that would spoil them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from outlines_core import Index, Vocabulary

from tests.constraints.helpers import LIMITS, accepts, over_bytes, reads
from vllm_dllm.constraints.automaton.byte_automaton import byte_automaton
from vllm_dllm.constraints.automaton.equal_rows import equal_rows
from vllm_dllm.constraints.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    chars,
    literal,
    repeat,
    sequence,
)
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError


def naive(pattern: str, text: str) -> bool:
    """What outlines_core's index says without the sentinel."""
    index = Index(pattern, Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
    state, table = index.get_initial_state(), index.get_transitions()
    for byte in text.encode():
        if byte not in table.get(state, {}):
            return False
        state = table[state][byte]
    return state in index.get_final_states()


@pytest.mark.parametrize(("pattern", "text"), [("a(bc)?", "abc"), ("a|ab", "ab"), ("a??b?", "ab")])
def test_edges_behind_a_match_are_kept(pattern: str, text: str) -> None:
    """The trap: from an accepting state the index has only edges to accepting ones."""
    assert re.fullmatch(pattern, text)
    assert accepts("regex", pattern, text)
    if pattern != "a??b?":
        assert not naive(pattern, text), "outlines_core no longer loses these edges"


def test_every_state_leads_to_the_end() -> None:
    found = over_bytes("regex", "a(b|c[d-f]{2}){1,3}|xyz")
    assert reads(found, b"abcdef"[:2])
    assert reads(found, b"acde")
    assert not reads(found, b"ac")
    assert (found.next != -1).any(1)[~found.accepting].all()


def test_equal_rows_are_found_and_believed_only_when_compared() -> None:
    rows = np.array([[1, 2], [0, 0], [1, 2], [-1, 5], [0, 0]])
    first, group = equal_rows(rows)
    assert first.tolist() == [0, 1, 3]
    assert group.tolist() == [0, 1, 0, 2, 1]
    assert equal_rows(np.zeros((3, 0), dtype=np.int32))[1].tolist() == [0, 0, 0]


def test_rows_with_the_same_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros:
        def integers(self, *_: object, size: int, dtype: object) -> np.ndarray:
            return np.zeros(size, dtype=np.int64)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Zeros())
    first, group = equal_rows(np.array([[1, 2], [0, 0], [1, 2]]))
    assert first.tolist() == [0, 1]
    assert group.tolist() == [0, 1, 0]


def test_equal_futures_are_joined() -> None:
    assert len(over_bytes("regex", "(?:abc|xbc|abc|yb(?:c))").next) == 4
    assert len(over_bytes("regex", "a{300}").next) == 301


def test_no_text_holds_the_sentinel() -> None:
    assert not accepts("regex", "a.b", "a\0b")
    assert accepts("regex", "a.b", "a\1b")
    assert accepts("regex", "a.b", "aéb")
    assert accepts("regex", "a.b", "a\U0001f600b")


def test_bytes_that_are_no_utf8_are_not_accepted() -> None:
    found = over_bytes("regex", ".*")
    assert reads(found, "é日\U0001f600".encode())
    for wrong in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xe9"):
        assert not reads(found, wrong), wrong


def test_nothing_and_too_much() -> None:
    with pytest.raises(ConstraintError, match="no output at all"):
        byte_automaton(NOTHING, LIMITS)
    assert byte_automaton(EMPTY_TEXT, LIMITS).accepting.tolist() == [True]
    with pytest.raises(ConstraintError, match="no output at all"):
        byte_automaton(sequence(literal("a"), chars([])), LIMITS)
    big = repeat(repeat(literal("a"), 1000, 1000), 1000, 1000)
    with pytest.raises(ConstraintError, match=r"1001001 byte positions, at most 200000"):
        byte_automaton(big, LIMITS)
    with pytest.raises(ConstraintError, match=r"1002 states over bytes, at most 100"):
        byte_automaton(repeat(literal("a"), 1000, 1000), CompileLimits(byte_states=100))
