"""Grammars for models that fill text out of order.

A `Constraint` (a regular expression, a JSON schema, a grammar or a structural tag) is compiled by
`canvas_grammar.automaton.compilation.compile_constraint` to an automaton over the tokens of a
`Vocabulary`. `canvas_grammar.decoding` finds the best path through a canvas whose positions a model
may decide in any order, or draws one.

This module imports neither torch nor the readers of constraints, which take half a second.
"""

from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.constraint import Constraint, Thought
from canvas_grammar.limits import CompileLimits, ConstraintError

__version__ = "0.1.0"
__all__ = [
    "CompileLimits", "CompiledConstraint", "Constraint", "ConstraintError", "Thought", "Vocabulary",
]  # fmt: skip
