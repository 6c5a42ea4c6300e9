"""From the rules of a grammar, as a user wrote them, to a language that can be compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from canvas_grammar.grammar.language import NOTHING, Node
from canvas_grammar.grammar.reachable import (
    calls,
    productive_rules,
    reachable,
    replaced,
)
from canvas_grammar.grammar.recursion import without_edge_recursion
from canvas_grammar.grammar.rules import Call, Rule
from canvas_grammar.limits import ConstraintError

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


def _with_short_rules_copied(whole: Rule) -> Node:
    """The language of `whole`, with rules in place of their calls wherever they are short.

    Rules that call each other in a circle are reduced to few that call themselves.
    """
    edges = {rule: set(calls(rule.body)) for rule in reachable(whole)}
    callers: dict[Rule, set[Rule]] = {rule: set() for rule in edges}
    for caller, called in edges.items():
        for rule in called:
            callers[rule].add(caller)
    for rule in sorted(edges, key=lambda rule: rule.body.positions):
        once = len(callers[rule]) == 1 and sum(1 for _ in _calls_of(rule, callers[rule])) == 1
        if rule is whole or rule in edges[rule]:
            continue
        if not once and rule.body.positions > MOST_COPIED_POSITIONS:
            continue
        for caller in callers[rule]:
            _copy(rule, caller)
            edges[caller] = edges[caller] - {rule} | edges[rule]
        for inner in edges.pop(rule):
            callers[inner] = callers[inner] - {rule} | callers[rule]
    return whole.body


def _calls_of(rule: Rule, callers: Iterable[Rule]) -> Iterator[Rule]:
    return (called for caller in callers for called in calls(caller.body) if called is rule)


def _copy(rule: Rule, caller: Rule) -> None:
    """Put the body of a rule in place of its calls in the body of another one."""

    def replace(called: Rule) -> Node:
        return rule.body if called is rule else Call(called)

    caller.body = replaced(caller.body, replace, {})
