"""Grammars for models that fill text out of order.

A `Constraint` (a regular expression, a JSON schema, a grammar or a structural tag) is compiled by
`compile_constraint` to an automaton over the tokens of a `Vocabulary`. `canvas_grammar.decoding`
finds the best path through a canvas whose positions a model may decide in any order, or draws one.

Importing this package imports nothing else; its parts are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from canvas_grammar.automaton.compilation import compile_constraint
    from canvas_grammar.automaton.compiled import CompiledConstraint
    from canvas_grammar.automaton.vocabulary import Vocabulary
    from canvas_grammar.constraint import Constraint
    from canvas_grammar.limits import CompileLimits, ConstraintError

__version__ = "0.1.0"
__all__ = [
    "CompileLimits",
    "CompiledConstraint",
    "Constraint",
    "ConstraintError",
    "Vocabulary",
    "compile_constraint",
]
_HOMES = {
    "CompileLimits": "limits",
    "CompiledConstraint": "automaton.compiled",
    "Constraint": "constraint",
    "ConstraintError": "limits",
    "Vocabulary": "automaton.vocabulary",
    "compile_constraint": "automaton.compilation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
