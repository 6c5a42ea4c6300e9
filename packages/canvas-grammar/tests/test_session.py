"""A session as the README shows it: the best paths of canvases that follow each other."""

from __future__ import annotations

import re

import torch
from canvas_grammar.decoding import NO_STATE, START, Session
from canvas_grammar_support.helpers import compiled, letters

LENGTH = 8
WORDS = ["", "a", "b", "c", "ab", "ba", "aa", "abc", "bc", "é", "1", "2", "12", ""]  # of `letters`


def test_a_text_of_several_canvases_ends_within_its_budget() -> None:
    """Positions are decided from the last one on, by a model that never wants to end."""
    session = Session(compiled("regex", "(ab)+[0-9]", letters()), LENGTH, torch.device("cpu"))
    state, budget, tokens = START, 2 * LENGTH + 3, []
    logits = torch.zeros(LENGTH, len(WORDS))
    logits[:, WORDS.index("ab")] = 5.0
    while budget > 0:
        forced = torch.full((LENGTH,), -1)
        for position in reversed(range(LENGTH)):
            path = session.best_path(logits, forced, budget, state)
            assert path.feasible.all()
            forced[position] = path.token[0, position]
        tokens += forced[:budget].tolist()
        state, budget = session.after(forced[:budget].tolist(), state), budget - LENGTH
        assert state == session.after(tokens) != NO_STATE
    text = "".join(WORDS[token] for token in tokens)
    assert re.fullmatch("(ab)+[0-9]", text)
    assert tokens[-1] == 0
    assert text.count("ab") > 2 * LENGTH, "what the model wants is followed"
    assert session.after([*tokens, WORDS.index("a")]) == NO_STATE, "nothing follows the end"
