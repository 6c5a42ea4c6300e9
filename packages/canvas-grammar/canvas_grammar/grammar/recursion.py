"""Grammars whose rules may begin or end with calls of themselves, made ready to be compiled.

A compiled rule must not begin with a call of itself, and each call that is open takes a place of a
bounded stack. Both kinds of recursion repeat something, so they are rewritten as repetitions: the
least solution of ``A = A w | b`` is ``b w*``, and that of ``A = w A | b`` is ``w* b``, also where
``w`` and ``b`` call ``A`` somewhere else. Rules that begin (or end) with calls of each other are
such equations in several unknowns, which are eliminated one after the other. The language stays
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Chain,
    Either,
    Node,
    Repeat,
    either,
    optional,
    repeat,
    sequence,
)
from canvas_grammar.grammar.reachable import (
    calls,
    cycles,
    empty_rules,
    may_be_empty,
    reachable,
    replaced,
)
from canvas_grammar.grammar.rules import Call, Rule


@dataclass
class _Equation:
    """A language as ``A w_A | B w_B | ... | rest``, from its begin (or, mirrored, its end)."""

    factors: dict[Rule, Node] = field(default_factory=dict)
    rest: Node = NOTHING

    def add(self, rule: Rule, factor: Node) -> None:
        self.factors[rule] = either([self.factors.get(rule, NOTHING), factor])


def without_edge_recursion(root: Rule) -> Node:
    """The language of `root`, of which no rule begins with a call of itself.

    Recursion at the end of a rule becomes repetition as well where that is simple.
    """
    language = _without_empty_rules(root)
    for mirrored in (False, True):
        side = _Side(mirrored)
        for group in cycles({rule: side.edge(rule.body) for rule in reachable(root)}):
            side.eliminate(group)
    return language


def _without_empty_rules(root: Rule) -> Node:
    """The language of `root`, with optional calls of rules in place of rules that may be empty."""
    rules = reachable(root)
    bodies = {rule: rule.body for rule in rules}  # holds the nodes that `known` names
    empty = empty_rules(rules)
    known: dict[int, Node] = {}

    def replace(rule: Rule) -> Node:
        if rule in empty and not any(True for _ in calls(bodies[rule])):
            return bodies[rule]
        return optional(Call(rule)) if rule in empty else Call(rule)

    for rule, body in bodies.items():
        rule.body = replaced(body, replace, known)
        if rule in empty:
            rule.body = _nonempty(rule.body)
    return replace(root)


def _nonempty(node: Node) -> Node:
    """The texts of a language but the empty one; none of its rules may be empty."""
    if not may_be_empty(node):
        return node
    if isinstance(node, Either):
        return either(_nonempty(option) for option in node.options)
    if isinstance(node, Repeat):
        most = None if node.most is None else node.most - 1
        return sequence(_nonempty(node.part), repeat(node.part, 0, most))
    assert isinstance(node, Chain)
    if not node.parts:
        return NOTHING
    first, rest = node.parts[0], sequence(*node.parts[1:])
    return either([sequence(_nonempty(first), rest), _nonempty(rest)])


class _Side:
    """The begin of languages, or, mirrored, their end."""

    def __init__(self, mirrored: bool) -> None:
        self.mirrored = mirrored
        self._edges: dict[int, tuple[Node, frozenset[Rule]]] = {}

    def concat(self, near: Node, far: Node) -> Node:
        return sequence(far, near) if self.mirrored else sequence(near, far)

    def inward(self, chain: Chain) -> tuple[Node, ...]:
        return chain.parts[::-1] if self.mirrored else chain.parts

    def edge(self, node: Node) -> frozenset[Rule]:
        """Rules that are called at the edge of a text of the language."""
        known = self._edges.get(id(node))
        if known is None:
            # The node is kept, because an `id` is unique among living objects only.
            known = self._edges[id(node)] = (node, frozenset(self._edge(node)))
        return known[1]

    def _edge(self, node: Node) -> Iterator[Rule]:
        if isinstance(node, Call):
            yield node.rule
        elif isinstance(node, Chain):
            for part in self.inward(node):
                yield from self.edge(part)
                if not may_be_empty(part):
                    return
        else:
            for part in node.inside():
                yield from self.edge(part)

    def eliminate(self, group: list[Rule]) -> None:
        """Solve the equations of rules that begin with calls of each other, and replace them."""
        members = frozenset(group)
        equations = {rule: self.split(rule.body, members) for rule in group}
        for pivot in group:
            solved = equations[pivot]
            again = repeat(solved.factors.pop(pivot, NOTHING), 0, None)
            solved.factors = {r: self.concat(w, again) for r, w in solved.factors.items()}
            solved.rest = self.concat(solved.rest, again)
            for rule in group:
                factor = equations[rule].factors.pop(pivot, None) if rule is not pivot else None
                if factor is None:
                    continue
                for other, inner in solved.factors.items():
                    equations[rule].add(other, self.concat(inner, factor))
                rest = self.concat(solved.rest, factor)
                equations[rule].rest = either([equations[rule].rest, rest])
        for rule in group:
            rule.body = equations[rule].rest

    def split(self, node: Node, members: frozenset[Rule]) -> _Equation:
        """The calls of `members` at the edge of a language, and what follows each of them."""
        if not self.edge(node) & members:
            return _Equation(rest=node)
        if isinstance(node, Call):
            return _Equation({node.rule: EMPTY_TEXT})
        found = _Equation()
        if isinstance(node, Either):
            for option in node.options:
                self._merge(found, self.split(option, members), EMPTY_TEXT)
        elif isinstance(node, Repeat):
            if self.mirrored and node.most != 1:
                return _Equation(rest=node)  # unrolled it would be larger, and no better
            least = 0 if may_be_empty(node.part) else node.least
            most = None if node.most is None else node.most - 1
            part = self.split(node.part, members)
            part.rest = _nonempty(part.rest)
            self._merge(found, part, repeat(node.part, max(least - 1, 0), most))
            if least == 0:
                found.rest = either([found.rest, EMPTY_TEXT])
        else:
            assert isinstance(node, Chain)
            parts = self.inward(node)
            others = parts[:0:-1] if self.mirrored else parts[1:]
            far = sequence(*others)
            near = self.split(parts[0], members)
            if may_be_empty(near.rest) and self.edge(far) & members:
                near.rest = _nonempty(near.rest)
                self._merge(found, self.split(far, members), EMPTY_TEXT)
            self._merge(found, near, far)
        return found

    def _merge(self, found: _Equation, part: _Equation, far: Node) -> None:
        for rule, factor in part.factors.items():
            found.add(rule, self.concat(factor, far))
        found.rest = either([found.rest, self.concat(part.rest, far)])
