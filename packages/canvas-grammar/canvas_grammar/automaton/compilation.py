"""Compile a constraint to an automaton over tokens."""

from __future__ import annotations

import json

from canvas_grammar.automaton.compiled import CompiledConstraint, Facts
from canvas_grammar.automaton.configurations import START, Configurations
from canvas_grammar.automaton.pushdown import pushdown_tables
from canvas_grammar.automaton.rule_automata import EmptyLanguageError, rule_automata
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.automaton.windows import window
from canvas_grammar.constraint import Constraint
from canvas_grammar.grammar.free_text import after_thought
from canvas_grammar.grammar.grammars import grammar
from canvas_grammar.grammar.json.reader import JsonReader, read_schema
from canvas_grammar.grammar.json.values import JsonLayout
from canvas_grammar.grammar.language import Chars, Node, Ranges, intersection
from canvas_grammar.grammar.marks import Marks
from canvas_grammar.grammar.regex import choice, regex
from canvas_grammar.grammar.structural_tag import read_structural_tag
from canvas_grammar.limits import CompileLimits, ConstraintError, counted

# The length in tokens of the longest canvas for which the first states are found in advance.
LONGEST_CANVAS = 256
JSON_SPACE: Ranges = ((0x9, 0xA), (0xD, 0xD), (0x20, 0x20))


def read_constraint(
    constraint: Constraint, limits: CompileLimits, marks: Marks
) -> tuple[Node, tuple[str, ...]]:
    """The texts that a constraint allows, and ignored keywords, each with its first place.

    Raises:
        ConstraintError: the constraint cannot be served; the message says why.
    """
    if constraint.kind == "regex":
        return regex(constraint.text), ()
    if constraint.kind == "grammar":
        return grammar(constraint.text, limits), ()
    try:
        value = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"{constraint.kind}: not JSON ({error})") from error
    if constraint.kind == "choice":
        if not isinstance(value, list):
            raise ConstraintError("choice is a list of strings")
        return choice(value), ()
    if constraint.kind == "structural_tag":
        return read_structural_tag(value, limits, marks)
    if constraint.kind == "json_object":
        value = {"type": "object"}
    layout = None
    if constraint.whitespace is not None:
        gap = regex(constraint.whitespace)
        _check_blank(gap)
        layout = JsonLayout(gap)
    found = read_schema(value, layout)
    return found.node, found.ignored


def compile_constraint(
    constraint: Constraint, vocabulary: Vocabulary, limits: CompileLimits
) -> CompiledConstraint:
    """Compile a constraint. This takes milliseconds, or minutes if its sender is hostile.

    The states of the first canvas are found here rather than by the worker.

    Raises:
        ConstraintError: it cannot be served; the message says why.
    """
    with counted(limits):
        depth = limits.calls if constraint.depth is None else constraint.depth
        marks = Marks(vocabulary.added, vocabulary.special, constraint.hides_special)
        language, ignored = read_constraint(constraint, limits, marks)
        if constraint.thought is not None:
            language = after_thought(constraint.thought, language, marks)
        vocabulary = vocabulary.with_marks(marks.numbers)
        try:
            automata = rule_automata(language, limits)
        except EmptyLanguageError as error:
            raise _explained(error, constraint, limits) from error
        configurations = Configurations(pushdown_tables(automata, vocabulary, limits), depth)
        first = window(configurations, START, LONGEST_CANVAS, limits.window_states)
        minimum = int(first.automaton.distance[0])
        return CompiledConstraint.pack(Facts(minimum, depth, ignored), configurations)


def _explained(
    error: EmptyLanguageError, constraint: Constraint, limits: CompileLimits
) -> ConstraintError:
    """The same refusal, for a JSON schema with the places and keywords that exclude each other."""
    if constraint.kind != "json_schema":
        return error
    reader = JsonReader(json.loads(constraint.text), JsonLayout())
    try:
        rule_automata(reader.read().node, limits)
    except EmptyLanguageError as again:
        return reader.contradiction(again.nodes) or error
    return error


def _check_blank(gap: Node) -> None:
    """Refuse characters that are not white space in JSON."""
    if isinstance(gap, Chars) and intersection(gap.ranges, JSON_SPACE) != gap.ranges:
        raise ConstraintError("whitespace may hold only JSON's: space, tab and line ends")
    for part in gap.inside():
        _check_blank(part)
