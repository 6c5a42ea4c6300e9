"""Rules without any text, taken out of the languages that call them."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_dllm.constraints.grammar.language import (
    NOTHING,
    Chain,
    Either,
    Node,
    Repeat,
    either,
    repeat,
    sequence,
)
from vllm_dllm.constraints.grammar.rules import Behind, Call, Rule


class Pruned:
    """Finds the rules that derive no text, and sets the bodies of all others without them."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = list(rules)
        self.own = {id(rule) for rule in self.rules}  # all others are scalars, which have texts
        self.productive: set[int] = set()
        waiting = self.rules
        while True:
            left = [rule for rule in waiting if not self._derives(rule.body)]
            if len(left) == len(waiting):
                break
            self.productive |= {id(rule) for rule in waiting} - {id(rule) for rule in left}
            waiting = left
        self.dead = {id(rule) for rule in waiting}
        self._known: dict[int, Node] = {}
        if self.dead:
            for rule in self.rules:
                rule.body = self.node(rule.body)

    def _derives(self, node: Node) -> bool:
        """Whether a language has a text, as far as is known."""
        if isinstance(node, Call):
            return id(node.rule) in self.productive or id(node.rule) not in self.own
        if isinstance(node, Chain):
            return all(map(self._derives, node.parts))
        if isinstance(node, Either):
            return any(map(self._derives, node.options))
        if isinstance(node, Repeat):
            return node.least == 0 or self._derives(node.part)
        if isinstance(node, Behind):
            return self._derives(node.rest)
        return not node.empty

    def node(self, node: Node) -> Node:
        """A language without calls of rules that derive no text."""
        if not self.dead:
            return node
        if id(node) not in self._known:
            self._known[id(node)] = self._node(node)
        return self._known[id(node)]

    def _node(self, node: Node) -> Node:
        if isinstance(node, Call):
            return NOTHING if id(node.rule) in self.dead else node
        if isinstance(node, Chain):
            return sequence(*map(self.node, node.parts))
        if isinstance(node, Either):
            return either(map(self.node, node.options))
        if isinstance(node, Repeat):
            return repeat(self.node(node.part), node.least, node.most)
        if isinstance(node, Behind):
            rest = self.node(node.rest)
            return NOTHING if rest.empty else Behind(node.first, rest)
        return node
