"""The refusal of a constraint without any text, which names the place if it knows one."""

from __future__ import annotations

from collections.abc import Sequence

from canvas_grammar.grammar.json.layout import names_a_place
from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.rules import Call
from canvas_grammar.limits import ConstraintError

MESSAGE = "the constraint allows no output at all"


class EmptyLanguageError(ConstraintError):
    """A language has no text at all.

    Attributes:
        rules: the numbers of its rules without any text, those of outer rules first.
        nodes: what these rules are, once that is known.
    """

    def __init__(self, rules: list[int], place: str = "", nodes: Sequence[Node] = ()) -> None:
        super().__init__(f"{place}: {MESSAGE}" if place else MESSAGE)
        self.rules = rules
        self.nodes = nodes

    def named(self, nodes: Sequence[Node]) -> EmptyLanguageError:
        """The same error with the place of the innermost rule that has one in a schema.

        Args:
            nodes: what each number stands for.
        """
        empty = [nodes[rule] for rule in self.rules]
        names = [node.rule.name for node in empty if isinstance(node, Call)]
        places = [name for name in names if names_a_place(name)]
        return EmptyLanguageError(self.rules, places[-1] if places else "", empty)
