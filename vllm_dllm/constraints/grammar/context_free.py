"""From the rules of a grammar, as a user wrote them, to a language that can be compiled."""

from __future__ import annotations

from collections import Counter

from vllm_dllm.constraints.grammar.language import NOTHING, Node
from vllm_dllm.constraints.grammar.reachable import (
    calls,
    cycles,
    productive_rules,
    reachable,
    replaced,
)
from vllm_dllm.constraints.grammar.recursion import without_edge_recursion
from vllm_dllm.constraints.grammar.rules import Call, Rule
from vllm_dllm.constraints.limits import ConstraintError

# Byte positions up to which a rule that does not call itself is written out wherever it is called.
# An open call takes a place of a bounded stack, so the fewer there are, the deeper texts may nest.
MOST_COPIED_POSITIONS = 400


def context_free(root: Rule) -> Node:
    """The language of a grammar's root.

    Args:
        root: its first rule. Rules may call each other and themselves anywhere; their bodies are
            replaced.

    Raises:
        ConstraintError: no text belongs to the language.
    """
    _drop_useless_options(root)
    whole = Rule(root.name, without_edge_recursion(root))
    return _with_short_rules_copied(whole)


def _drop_useless_options(root: Rule) -> None:
    """Remove the calls of rules of which no text comes to an end."""
    rules = reachable(root)
    useful = productive_rules(rules)
    if root not in useful:
        raise ConstraintError(f"grammar: {root.name} allows no text at all: each would be endless")
    known: dict[int, Node] = {}
    bodies = {rule: rule.body for rule in rules}  # holds the nodes that `known` names

    def replace(rule: Rule) -> Node:
        return Call(rule) if rule in useful else NOTHING

    for rule, body in bodies.items():
        rule.body = replaced(body, replace, known)


def _with_short_rules_copied(root: Rule) -> Node:
    """The language of `root`, with short rules in place of their calls."""
    rules = reachable(root)
    edges = {rule: frozenset(calls(rule.body)) for rule in rules}
    recursive = {rule for group in cycles(edges) for rule in group}
    callers = Counter(called for rule in rules for called in edges[rule])
    bodies = {rule: rule.body for rule in rules}  # holds the nodes that `known` names
    known: dict[int, Node] = {}
    done: dict[Rule, Node] = {}

    def replace(rule: Rule) -> Node:
        if rule in recursive:
            return Call(rule)
        if rule not in done:
            done[rule] = replaced(bodies[rule], replace, known)
        copied = callers[rule] == 1 or done[rule].positions <= MOST_COPIED_POSITIONS
        if not copied:
            rule.body = done[rule]
        return done[rule] if copied else Call(rule)

    for rule in recursive:
        rule.body = replaced(bodies[rule], replace, known)
    return replaced(root.body, replace, known)
