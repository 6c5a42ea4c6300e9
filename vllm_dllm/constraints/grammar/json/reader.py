"""JSON schemas, and the languages of the JSON texts that satisfy them.

A keyword either does what JSON Schema says, or does not affect validity, or is refused by name. The
texts that are offered may be fewer than those that a schema allows, but never more. What is left
out is said in `objects`, `arrays`, `negation` and `leftovers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_dllm.constraints.grammar.json.arrays import ArrayWriter
from vllm_dllm.constraints.grammar.json.constants import json_text
from vllm_dllm.constraints.grammar.json.contradictions import Contradictions
from vllm_dllm.constraints.grammar.json.expansion import Expansion
from vllm_dllm.constraints.grammar.json.facts import Facts
from vllm_dllm.constraints.grammar.json.layout import JsonLayout, short
from vllm_dllm.constraints.grammar.json.objects import ObjectWriter
from vllm_dllm.constraints.grammar.json.parts import Literal, unique
from vllm_dllm.constraints.grammar.json.productive import Pruned
from vllm_dllm.constraints.grammar.json.references import Document
from vllm_dllm.constraints.grammar.json.scalars import scalar_language
from vllm_dllm.constraints.grammar.language import NOTHING, Node, either, literal
from vllm_dllm.constraints.grammar.rules import Call, Rule
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

MOST_RULES = 20_000
LARGEST_INLINE = 64  # byte positions of strings and numbers that are copied to where they occur


@dataclass(frozen=True)
class SchemaLanguage:
    """What a schema was read as.

    Attributes:
        node: the language of the texts that are offered.
        ignored: keywords that do not affect validity because nothing says what they mean, with
            their first place.
        left_out: places where a negation cannot be expressed in full, so that some values are not
            offered.
    """

    node: Node
    ignored: tuple[str, ...]
    left_out: tuple[str, ...]


def json_schema(schema: Any, limits: CompileLimits, layout: JsonLayout | None = None) -> Node:
    """The language of the JSON texts that satisfy a schema.

    Raises:
        ConstraintError: the schema is too large, or a keyword is not supported; the message then
            names the keyword and its place.
    """
    return read_schema(schema, limits, layout).node


def read_schema(
    schema: Any, limits: CompileLimits, layout: JsonLayout | None = None
) -> SchemaLanguage:
    """As `json_schema`, and what was ignored and left out.

    Raises:
        ConstraintError: as `json_schema`.
    """
    try:
        reader = _SchemaReader(schema, layout or JsonLayout())
        node = reader.whole()
    except RecursionError as error:
        raise ConstraintError("the schema nests too deeply") from error
    left_out = reader.expansion.left_out.items()
    return SchemaLanguage(
        node,
        tuple(reader.document.ignored.values()),
        tuple(f"{short(part.place)}: {', '.join(unsaid)}" for part, unsaid in left_out),
    )


class _SchemaReader:
    """Makes one rule for all arrays and objects that meet the same conditions."""

    def __init__(self, schema: Any, layout: JsonLayout) -> None:
        self.document = Document(schema)
        self.expansion = Expansion(self.document)
        self.objects = ObjectWriter(self.expansion, layout, self.value)
        self.arrays = ArrayWriter(self.expansion, layout, self.value)
        self.known: dict[frozenset[Literal], Node] = {}
        self.rules: dict[tuple[object, ...], Rule] = {}
        self.origin: dict[Rule, tuple[Literal, ...]] = {}
        self.without = Contradictions(self.expansion)
        self.ahead: deque[tuple[Rule, list[Facts], str]] = deque()

    def whole(self) -> Node:
        """The language of the document."""
        node = self.value((Literal(self.document.root),))
        while self.ahead:
            rule, alternatives, place = self.ahead.popleft()
            rule.body = self._located(partial(self._bodies, alternatives), place)
            if rule.body.empty:
                self.without.add(self.origin[rule])
        node = Pruned(self.rules.values()).node(node)
        if node.empty:
            self.without.add((Literal(self.document.root),))
            raise self.without.error()
        return node

    def value(self, literals: tuple[Literal, ...]) -> Node:
        """The language of the values that meet some conditions."""
        literals = unique(tuple(map(self.document.plain, literals)))
        key = frozenset(literals)
        if key not in self.known:
            place = literals[0].part.place if literals else "$"
            self.known[key] = self._located(lambda: self._value(literals, place), place)
            if self.known[key].empty:
                self.without.add(literals)
        return self.known[key]

    def _value(self, literals: tuple[Literal, ...], place: str) -> Node:
        if any(each.hopeless for each in literals):
            return NOTHING
        options, compound = [], []
        for kind in self.expansion.kinds(literals):
            alternatives = self.expansion.alternatives(kind, literals)
            if kind in ("array", "object"):
                compound += alternatives
            else:
                options += [scalar_language(facts) for facts in alternatives]
        node = either(options)
        if node.positions > LARGEST_INLINE:
            node = Call(Rule(place, node))
        if compound:
            node = either([node, self._called(compound, place, literals)])
        return node

    def _called(self, alternatives: list[Facts], place: str, literals: tuple[Literal, ...]) -> Node:
        key = tuple(facts.key() for facts in alternatives)
        if key not in self.rules:
            if len(self.rules) >= MOST_RULES:
                raise ConstraintError(
                    f"the schema describes more than {MOST_RULES} kinds of objects and arrays"
                )
            self.rules[key] = Rule(place)
            self.origin[self.rules[key]] = literals
            self.ahead.append((self.rules[key], alternatives, place))
        return Call(self.rules[key])

    def _bodies(self, alternatives: list[Facts]) -> Node:
        return either(map(self._body, alternatives))

    def _body(self, facts: Facts) -> Node:
        """The objects or arrays that meet conditions."""
        if facts.values is not None:
            left = (v for v in facts.values.values() if self.expansion.fits(facts, v, False))
            return either(literal(json_text(value)) for value in left)
        return (self.objects if facts.kind == "object" else self.arrays).language(facts)

    def _located(self, read: Callable[[], Node], place: str) -> Node:
        """Run a reader; its errors get a place if they name none."""
        try:
            return read()
        except ConstraintError as error:
            if str(error).startswith(("$", "#", "http")):
                raise
            raise ConstraintError(f"{short(place)}: {error}") from error
