"""Vocabularies and automata for tests; everything in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from canvas_grammar.automaton.compilation import (
    Constraint,
    compile_constraint,
    read_constraint,
)
from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import START
from canvas_grammar.automaton.graph import DEAD
from canvas_grammar.automaton.rule_automata import RuleAutomata, regular_automaton
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.automaton.windows import TokenAutomaton, Window, window
from canvas_grammar.decoding.best_path import CanvasWindow
from canvas_grammar.grammar.marks import Marks
from canvas_grammar.limits import CompileLimits, ConstraintError

from canvas_grammar_support.checkout import TINY_LLADA2

LIMITS = CompileLimits()
STRING: dict[str, Any] = {"type": "string"}
END = 0  # of the vocabularies below


@cache
def letters() -> Vocabulary:
    """Few tokens, some of several bytes, and one without any; id 0 ends a text."""
    words = ["a", "b", "c", "ab", "ba", "aa", "abc", "bc", "é", "1", "2", "12"]
    return Vocabulary.from_tokens([b"", *(word.encode() for word in words), b""], [END])


@cache
def pieces() -> Vocabulary:
    """Every byte, and pieces as they occur in JSON and prose: a small real vocabulary."""
    rng = np.random.default_rng(0)
    text = (
        '{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true, "none": null, "price": -12.5e3}'
        '  {"date": "2024-02-29", "email": "ada@example.org"}, [1, 2, 3], false "über naïve 日本語"'
        ' the quick brown fox jumps over the lazy dog 0123456789 \\n \\" \\\\ \\u0007'
    ).encode()
    found: dict[bytes, None] = {}
    while len(found) < 1243:
        first, size = rng.integers(len(text) - 8), rng.integers(2, 9)
        found[text[first : first + size]] = None
        if rng.random() < 0.5:
            found[bytes(rng.integers(1, 256, size=2, dtype=np.uint8))] = None
    tokens = [b"", *(bytes([byte]) for byte in range(256)), *found]
    return Vocabulary.from_tokens(tokens, [END])


@cache
def tiny() -> Vocabulary:
    """That of the tiny LLaDA2 checkpoint: bytes, and special tokens after them."""
    path = TINY_LLADA2 / "tokenizer.json"
    return Vocabulary.read(path.read_text(encoding="utf-8"), 272, [257])


def over_bytes(kind: str, value: Any) -> RuleAutomata:
    """The automaton of a constraint whose rules do not call themselves, without calls."""
    found = regular_automaton(
        read_constraint(Constraint.from_value(kind, value), LIMITS, Marks())[0], LIMITS
    )
    if found is None:
        raise ConstraintError("the constraint allows no output at all")
    return found


def compiled(
    kind: str, value: Any, vocabulary: Vocabulary | None = None, limits: CompileLimits = LIMITS
) -> CompiledConstraint:
    return compile_constraint(Constraint.from_value(kind, value), vocabulary or letters(), limits)


def first_window(found: CompiledConstraint, length: int = 256) -> Window:
    return window(found.configurations(), START, length, LIMITS.window_states)


def automaton(kind: str, value: Any, vocabulary: Vocabulary | None = None) -> TokenAutomaton:
    """The automaton of a constraint that is small enough to be decoded as a whole."""
    found = first_window(compiled(kind, value, vocabulary))
    assert found.whole
    return found.automaton


def reads(automaton: RuleAutomata, text: bytes) -> bool:
    """Whether an automaton without calls accepts a text, byte after byte."""
    state = automaton.start
    for byte in text:
        state = int(automaton.next[state, byte])
        if state == DEAD:
            return False
    return bool(automaton.accepting[state])


def token_bytes(vocabulary: Vocabulary, token: int) -> bytes:
    return vocabulary.data[vocabulary.offsets[token] : vocabulary.offsets[token + 1]].tobytes()


def text_of(vocabulary: Vocabulary, tokens: Iterable[int]) -> bytes:
    """What tokens write, up to the first one that ends the text."""
    pieces = []
    for token in tokens:
        if token in vocabulary.ends:
            break
        pieces.append(token_bytes(vocabulary, token))
    return b"".join(pieces)


def canvas(
    length: int,
    budget: int,
    *,
    state: int = 0,
    first: int = 0,
    width: int | None = None,
    forced: Sequence[int] = (),
) -> CanvasWindow:
    """The window of one canvas."""
    kept = [*forced, *[-1] * (length - len(forced))]
    return CanvasWindow(
        *(torch.tensor([n]) for n in (state, first, budget, length if width is None else width)),
        torch.tensor([kept]),
    )


def together(windows: Iterable[CanvasWindow]) -> CanvasWindow:
    """The windows of several canvases."""
    return CanvasWindow(*map(torch.cat, zip(*(vars(w).values() for w in windows), strict=True)))


def record(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}
