"""Everything that the plugin uses from `canvas_grammar`; only `compiler` imports more.

A process without constraints need not load any of it, so this module is imported inside the
functions that serve constraints, never at the top of a module.
"""

from canvas_grammar import (
    CompiledConstraint,
    CompileLimits,
    Constraint,
    ConstraintError,
    Vocabulary,
)
from canvas_grammar.automaton.configurations import NO_STATE, START, Configurations
from canvas_grammar.automaton.windows import window
from canvas_grammar.decoding.automaton_batch import AutomatonBatch, OwnEdges
from canvas_grammar.decoding.best_path import CanvasWindow
from canvas_grammar.decoding.canvas_logits import CanvasLogits, FreeTokens
from canvas_grammar.decoding.constrained_step import (
    BatchConstraint,
    ConstrainedPath,
    best_and_drawn_tokens,
    best_tokens,
    drawn_tokens,
    path_probability,
)
from canvas_grammar.decoding.token_classes import BatchClasses, TokenClasses
from canvas_grammar.grammar.marks import (
    CALL,
    CALL_END,
    GEMMA_ARGUMENTS,
    GEMMA_TOKENS,
    LENIENT,
    MARKS,
)

__all__ = [
    "CALL",
    "CALL_END",
    "GEMMA_ARGUMENTS",
    "GEMMA_TOKENS",
    "LENIENT",
    "MARKS",
    "NO_STATE",
    "START",
    "AutomatonBatch",
    "BatchClasses",
    "BatchConstraint",
    "CanvasLogits",
    "CanvasWindow",
    "CompileLimits",
    "CompiledConstraint",
    "Configurations",
    "ConstrainedPath",
    "Constraint",
    "ConstraintError",
    "FreeTokens",
    "OwnEdges",
    "TokenClasses",
    "Vocabulary",
    "best_and_drawn_tokens",
    "best_tokens",
    "drawn_tokens",
    "path_probability",
    "window",
]
