"""Rules without any text, taken out of the languages that call them."""

from __future__ import annotations

from collections.abc import Iterable

from canvas_grammar.grammar.language import NOTHING, Node
from canvas_grammar.grammar.reachable import productive_rules, replaced
from canvas_grammar.grammar.rules import Call, Rule


class Pruned:
    """Finds the rules that derive no text, and sets the bodies of all others without them."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        own = list(rules)
        self.dead = set(own) - productive_rules(own)
        self._known: dict[int, Node] = {}
        self._bodies = [rule.body for rule in own]  # `_known` names their parts by `id()`
        for rule in own:
            rule.body = self.node(rule.body)

    def node(self, node: Node) -> Node:
        """A language without calls of rules that derive no text."""
        if not self.dead:
            return node
        return replaced(node, self._without_dead, self._known)

    def _without_dead(self, rule: Rule) -> Node:
        return NOTHING if rule in self.dead else Call(rule)
