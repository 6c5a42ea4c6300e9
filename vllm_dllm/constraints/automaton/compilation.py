"""A constraint as a request carries it, and its compilation to an automaton over tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from vllm_dllm.constraints.automaton.compiled import CompiledConstraint, Facts
from vllm_dllm.constraints.automaton.configurations import START, Configurations
from vllm_dllm.constraints.automaton.empty_language import EmptyLanguageError
from vllm_dllm.constraints.automaton.pushdown import pushdown_tables
from vllm_dllm.constraints.automaton.rule_automata import rule_automata
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.automaton.windows import window
from vllm_dllm.constraints.grammar.grammars import grammar
from vllm_dllm.constraints.grammar.json.layout import JsonLayout
from vllm_dllm.constraints.grammar.json.reader import JsonReader, read_schema
from vllm_dllm.constraints.grammar.language import ANY, Chars, Node, intersection
from vllm_dllm.constraints.grammar.regex import choice, regex
from vllm_dllm.constraints.grammar.structural_tag import read_structural_tag
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

# Tokens of the longest canvas for which the first states are found ahead.
LONGEST_CANVAS = 256
KINDS = ("choice", "grammar", "json_object", "json_schema", "regex", "structural_tag")
JSON_SPACE = frozenset(map(ord, " \t\n\r"))


@dataclass(frozen=True)
class Constraint:
    """What a request asks for. Equal constraints have the same automaton.

    Attributes:
        kind: one of `KINDS`.
        text: a regular expression or a grammar, or JSON: a schema, a structural tag or a list of
            strings; of a ``json_object`` it says nothing.
        whitespace: for schemas, a regular expression of the white space after opening brackets,
            colons and commas and before closing brackets. None stands for one optional space.
        depth: calls of rules that may be open inside each other; None for the usual number.
    """

    kind: str
    text: str
    whitespace: str | None = None
    depth: int | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        value: Any,
        whitespace: str | None = None,
        limits: CompileLimits | None = None,
    ) -> Constraint:
        """From what a request holds: text, or a schema, tag or list of choices as a JSON value.

        Raises:
            ConstraintError: an unknown kind, more than ``limits.characters``, or not JSON.
        """
        limits = limits or CompileLimits()
        if kind not in KINDS:
            raise ConstraintError(f"no such constraint: {kind}; supported: {', '.join(KINDS)}")
        if whitespace is not None and kind not in ("json_object", "json_schema"):
            raise ConstraintError(f"white space is settled for json_schema, not for {kind}")
        if not isinstance(value, str):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConstraintError(f"{kind}: not JSON ({error})") from error
        constraint = cls(kind, value, whitespace)
        size = len(value) + len(whitespace or "")
        if size > limits.characters:
            raise ConstraintError(
                f"{kind} is {size} characters long, at most {limits.characters} are served"
            )
        return constraint


def constraint_language(constraint: Constraint, limits: CompileLimits) -> Node:
    """The language of a constraint: the texts that it allows.

    Raises:
        ConstraintError: says why the constraint cannot be served.
    """
    return read_constraint(constraint, limits)[0]


def read_constraint(constraint: Constraint, limits: CompileLimits) -> tuple[Node, tuple[str, ...]]:
    """As `constraint_language`, and the keywords that are ignored, each with its first place.

    Raises:
        ConstraintError: as `constraint_language`.
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
        return read_structural_tag(value, limits)
    if constraint.kind == "json_object":
        value = {"type": "object"}
    layout = None
    if constraint.whitespace is not None:
        gap = regex(constraint.whitespace)
        _check_blank(gap)
        layout = JsonLayout(gap)
    found = read_schema(value, limits, layout)
    return found.node, found.ignored


def compile_constraint(
    constraint: Constraint, vocabulary: Vocabulary, limits: CompileLimits
) -> CompiledConstraint:
    """Compile a constraint in this process; see `CompilerPool` for others.

    The states of the first canvas are found here rather than by the worker.

    Raises:
        ConstraintError: says why it cannot be served.
    """
    depth = limits.calls if constraint.depth is None else constraint.depth
    language, ignored = read_constraint(constraint, limits)
    try:
        automata = rule_automata(language, limits)
    except EmptyLanguageError as error:
        raise _explained(error, constraint, limits) from error
    configurations = Configurations(pushdown_tables(automata, vocabulary, limits), depth)
    first = window(configurations, START, LONGEST_CANVAS, limits.window_states)
    minimum = int(first.automaton.distance[0])
    return CompiledConstraint.of(Facts(minimum, depth, ignored), configurations)


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
    if isinstance(gap, Chars):
        blank = tuple((code, code) for code in sorted(JSON_SPACE))
        characters = sum(last - first + 1 for first, last in gap.ranges)
        blank_characters = sum(last - first + 1 for first, last in intersection(gap.ranges, blank))
        if characters != blank_characters or intersection(gap.ranges, ANY) != gap.ranges:
            raise ConstraintError("whitespace may hold only JSON's: space, tab and line ends")
    for part in gap.inside():
        _check_blank(part)
