"""Special and added tokens under a structural tag, against expressions over tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
from canvas_grammar.automaton.compilation import compile_constraint
from canvas_grammar.automaton.configurations import END_OF_TEXT, NO_STATE, START
from canvas_grammar.automaton.vocabulary import MARK_BYTE, Vocabulary
from canvas_grammar.constraint import Constraint, Thought
from canvas_grammar.grammar.marks import MOST, OTHER, Marks
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.helpers import LIMITS, token_bytes

# How the tokens of `vocabulary` are written in the expressions here.
PLAIN = "a1<t>/"
SPECIAL = {"T": "<t>", "X": "<x>", "O": "a<t>a", "P": "<pad>", "I": "<image>"}
ADDED = {"E": "</t>", "N": "\n\n"}
TOKENS = [*PLAIN, *SPECIAL, *ADDED]
END = len(TOKENS)


def vocabulary() -> Vocabulary:
    added = [(text, True) for text in SPECIAL.values()] + [(text, False) for text in ADDED.values()]
    added.append(("<eos>", True))
    return Vocabulary.read(
        {
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
            "model": {"vocab": {char: n for n, char in enumerate(PLAIN)}},
            "added_tokens": [
                {"id": len(PLAIN) + n, "content": text, "special": special}
                for n, (text, special) in enumerate(added)
            ],
        },
        END + 2,
        [END],
        [TOKENS.index("P"), TOKENS.index("I"), 1 << 20],
    )


def test_what_tokens_write() -> None:
    known = vocabulary()
    texts = [token_bytes(known, n) for n in range(len(known))]
    assert texts[:6] == [char.encode() for char in PLAIN]
    special = bytes([MARK_BYTE, OTHER])
    assert texts[6:] == [special, special, special, b"", b"", b"</t>", b"\n\n", b"", b""]
    assert list(known.added) == ["<t>", "<x>", "a<t>a", "</t>"], "white space is no marker"
    with_marks = known.with_marks({TOKENS.index("E"): 3, TOKENS.index("T"): 2})
    changed = [token_bytes(with_marks, n) for n in range(len(known))]
    assert (changed[6], changed[11]) == (bytes([MARK_BYTE, 2]), bytes([MARK_BYTE, 3]))
    assert changed[:6] + changed[7:11] + changed[12:] == texts[:6] + texts[7:11] + texts[12:]


NUMBER = {"type": "regex", "pattern": "1"}
CALL = {"type": "tag", "begin": "<t>", "content": NUMBER, "end": "</t>"}
NOISE = {**CALL, "content": {"type": "any_text"}}
CALLS = {"type": "triggered_tags", "triggers": ["<t>"], "tags": [CALL]}
# Free text in which a trigger is not spelled. Special tokens that hold one would spell it.
PROSE = "(?:(?!<t>)[a1<t>/XE\n])*"
HIDDEN = "(?:(?!<[TXO]*t[TXO]*>)[a1<t>/XETO\n])*"
INSIDE = "(?:(?!</t>)[a1<t>/XTO\n])*"
CASES: dict[str, tuple[Any, bool, str]] = {
    "calls": (CALLS, False, f"(?:{PROSE}T1E)*{PROSE}"),
    "stop": ({**CALLS, "stop_after_first": True}, False, f"{PROSE}(?:T1E)?"),
    "required": ({**CALLS, "at_least_one": True}, False, f"T1E(?:{PROSE}T1E)*{PROSE}"),
    "excludes": ({"type": "any_text", "excludes": ["</t>"]}, False, "(?:(?!</t>)[a1<t>/TXO\n])*"),
    "short": ({"type": "any_text", "max_chars": 2}, False, "[a1<t>/TXO\n]{0,2}"),
    "text inside": (NOISE, False, f"T{INSIDE}E"),
    "a constant": ({"type": "const_string", "value": "a<t></t>\n\n"}, False, "aTE\n\n"),
    "hidden": (CALLS, True, f"(?:{HIDDEN}<t>1E)*{HIDDEN}"),
    "hidden constant": ({"type": "const_string", "value": "<t></t>"}, True, "<t>E"),
}


# After a thought; in "hidden thought" a client does not see what ends it.
OPEN = "(?:(?!</t>|<x>)[a1<t>/TO\n])*"
THOUGHTS = {
    "thought": (Thought("</t>", ("</t>", "<x>")), False, f"{OPEN}E1"),
    "open thought": (Thought("</t>", ("<x>",), may_be_all=True), False, f"{OPEN}(?:E1)?"),
    "hidden thought": (Thought("<t>"), True, f"{PROSE}T1"),
    "spelled thought": (Thought("a1"), False, "(?:(?!a1)[a1<t>/TXE\n])*a11"),
}


@pytest.mark.parametrize("name", [*CASES, *THOUGHTS])
def test_every_short_sequence_of_tokens(name: str) -> None:
    if name in CASES:
        given, hides, expression = CASES[name]
        constraint = Constraint.from_value("structural_tag", {"format": given})
        constraint = replace(constraint, hides_special=hides)
    else:
        thought, hides, expression = THOUGHTS[name]
        constraint = Constraint("regex", "1", hides_special=hides, thought=thought)
    known = vocabulary()
    found = compile_constraint(constraint, known, LIMITS).configurations()
    expected, random, fit = re.compile(expression), Random(0), 0
    some = ["".join(random.choices("T1E<t>/aXOP", k=random.randint(5, 9))) for _ in range(4000)]
    short = map("".join, (s for n in range(5) for s in product(TOKENS, repeat=n)))
    for text in [*short, *some, "T1E", "aT1E", "<t>1E", "XT1EX", "<Xt>1E", "T1</t>"]:
        state = START
        for token in text:
            state = found.after(state, TOKENS.index(token))
        ends = state != NO_STATE and found.after(state, END) == END_OF_TEXT
        assert ends == bool(expected.fullmatch(text.replace("N", ADDED["N"]))), text
        fit += ends
    assert fit


def test_a_constraint_names_a_limited_number_of_tokens() -> None:
    marks = Marks({f"<{n}>": n for n in range(1000)})
    for n in range(MOST - OTHER):
        assert marks.mark(n).first == OTHER + 1 + n == marks.mark(n).last
    with pytest.raises(ConstraintError, match="more than 124 special tokens"):
        marks.mark(MOST)
