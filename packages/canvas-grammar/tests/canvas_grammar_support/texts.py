"""Test helper: random short texts that an automaton over bytes accepts, from all its branches."""

from __future__ import annotations

import numpy as np
from canvas_grammar.automaton.graph import DEAD, fewest_steps
from canvas_grammar.automaton.rule_automata import RuleAutomata

WANDER = 40  # bytes, then straight to the end


def some_texts(automaton: RuleAutomata, count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    source, byte = np.nonzero(automaton.next != DEAD)
    distance = fewest_steps(source, automaton.next[source, byte], automaton.accepting)
    texts = []
    for _ in range(count):
        state, text = automaton.start, bytearray()
        while not automaton.accepting[state] or (len(text) < WANDER and rng.random() < 0.8):
            options = np.flatnonzero(automaton.next[state] != DEAD)
            if not len(options):
                break
            if len(text) >= WANDER:
                nearer = distance[automaton.next[state, options]] < distance[state]
                options = options[nearer]
            # As often one of the first kinds of bytes as another: else all texts are letters.
            targets = np.unique(automaton.next[state, options])
            target = rng.choice(targets)
            options = options[automaton.next[state, options] == target]
            text.append(int(rng.choice(options)))
            state = int(target)
        texts.append(text.decode())
    return texts
