"""JSON schemas, and the languages of the JSON texts that satisfy them.

A keyword either does what JSON Schema says, or does not affect validity, or is refused by name. The
offered texts may be fewer than those that a schema allows, but never more. `containers`, `negation`
and `expansion` say what is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from canvas_grammar.grammar.context_free import drop_dead_calls
from canvas_grammar.grammar.json.containers import ArrayWriter, ObjectWriter
from canvas_grammar.grammar.json.expansion import Expansion
from canvas_grammar.grammar.json.facts import Facts
from canvas_grammar.grammar.json.references import Document
from canvas_grammar.grammar.json.scalars import scalar_language
from canvas_grammar.grammar.json.subschemas import Literal, place_of, unique
from canvas_grammar.grammar.json.values import JsonLayout, json_text, names_a_place, short
from canvas_grammar.grammar.language import NOTHING, Node, either, literal
from canvas_grammar.grammar.rules import Call, Rule, is_empty, node_id
from canvas_grammar.limits import ConstraintError

# ---- Why a schema allows no value: the innermost places whose keywords exclude each other.

MOST_NAMED = 3  # places of a message
DEEPEST = 64

Conditions = tuple[Literal, ...]


class Contradictions:
    """Conditions that no value meets, those on inner places first."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self._found: dict[str, Conditions] = {}

    def add(self, literals: Conditions) -> None:
        """No value meets some conditions; a place counts only if none inside it was found."""
        place = place_of(literals)
        if not any(f"{inner}.".startswith(f"{place}.") for inner in self._found):
            self._found[place] = literals

    def error(self, refusal: str) -> ConstraintError:
        """A refusal of the schema, with places, keywords, and negations left unsaid."""
        named = map(self._named, list(self._found.values())[:MOST_NAMED])
        why = [
            f" (at {short(subschema.place)} it cannot be expressed that this does not hold: "
            f"{', '.join(words)})"
            for subschema, words in list(self.expansion.left_out.items())[:MOST_NAMED]
        ]
        places = "; ".join(dict.fromkeys(named))
        return ConstraintError(f"{places}: {refusal}{''.join(why)}")

    def _named(self, literals: Conditions) -> str:
        for _ in range(DEEPEST):
            inner = self.expansion.impossible_part(literals)
            if not inner:
                break
            literals = inner
        words: list[str] = []
        for subschema, negated in literals:
            words += ["not"] if negated else list(subschema.keywords) or ["false"]
        return f"{short(place_of(literals))}: {', '.join(dict.fromkeys(words))}"


MOST_RULES = 20_000
Context = TypeVar("Context")
LARGEST_INLINE = 64  # byte positions of strings and numbers that are copied to where they occur


@dataclass(frozen=True)
class SchemaLanguage:
    """The texts that are offered, and keywords that are ignored, with their first places."""

    node: Node
    ignored: tuple[str, ...]


def read_schema(schema: Any, layout: JsonLayout | None = None) -> SchemaLanguage:
    """The language of the JSON texts that satisfy a schema.

    Raises:
        ConstraintError: the schema is too large, or a keyword is not supported; the message then
            names the keyword and its place.
    """
    return JsonReader(schema, layout or JsonLayout()).read()


class SchemaReader(Generic[Context]):
    """Makes one rule for all arrays and objects that meet the same conditions.

    A subclass says how a notation writes values. That may depend on a context, which the notation
    gives to the parts of a value. `no_value` is the refusal if no value can be written.
    """

    no_value = "the schema allows no value"

    def __init__(self, schema: Any, context: Context) -> None:
        self.document = Document(schema)
        self.expansion = Expansion(self.document)
        self.context = context
        self.known: dict[tuple[frozenset[Literal], Context], Node] = {}
        self.read_as: list[tuple[Conditions, Node]] = []
        self.rules: dict[tuple[object, ...], Rule] = {}
        self.without = Contradictions(self.expansion)
        self.ahead: deque[tuple[Rule, list[Facts], Context, Conditions]] = deque()

    def scalar(self, facts: Facts, context: Context) -> Node:
        """The values of a type other than arrays and objects that meet conditions."""
        raise NotImplementedError

    def compound(self, facts: Facts, context: Context) -> Node:
        """The arrays or objects that meet conditions."""
        raise NotImplementedError

    def constant(self, value: Any, context: Context) -> Node:
        """A single array or object."""
        raise NotImplementedError

    def read(self) -> SchemaLanguage:
        """The language of the document."""
        try:
            return SchemaLanguage(self._whole(), tuple(self.document.ignored.values()))
        except RecursionError as error:
            raise ConstraintError("the schema nests too deeply") from error

    def contradiction(self, empty: Sequence[Node]) -> ConstraintError | None:
        """The refusal that names the places without a value, if these languages have no text.

        That two patterns have no text in common is known only when their automata are built.
        """
        known = set(map(node_id, empty))
        without = [literals for literals, node in self.read_as if is_empty(node, known)]
        for literals in reversed(without):  # inner places are read after outer ones
            self.without.add(literals)
        return self.without.error(self.no_value) if without else None

    def _whole(self) -> Node:
        node = self.value((Literal(self.document.root),), self.context)
        while self.ahead:
            rule, alternatives, context, literals = self.ahead.popleft()
            rule.body = self._located(partial(self._bodies, alternatives, context), literals)
            if rule.body.empty:
                self.without.add(literals)
        node = drop_dead_calls(self.rules.values(), node)
        if node.empty:
            self.without.add((Literal(self.document.root),))
            raise self.without.error(self.no_value)
        return node

    def value(self, literals: tuple[Literal, ...], context: Context) -> Node:
        """The language of the values that meet some conditions."""
        literals = unique(tuple(map(self.document.plain, literals)))
        key = frozenset(literals), context
        if key not in self.known:
            read = partial(self._value, literals, context)
            self.known[key] = self._located(read, literals)
            self.read_as.append((literals, self.known[key]))
            if self.known[key].empty:
                self.without.add(literals)
        return self.known[key]

    def _value(self, literals: Conditions, context: Context) -> Node:
        if any(each.hopeless for each in literals):
            return NOTHING
        options, compound = [], []
        for kind in self.expansion.kinds(literals):
            alternatives = self.expansion.alternatives(kind, literals)
            if kind in ("array", "object"):
                compound += alternatives
            else:
                options += [self.scalar(facts, context) for facts in alternatives]
        node = either(options)
        if node.positions > LARGEST_INLINE:
            node = Call(Rule(place_of(literals), node))
        if compound:
            node = either([node, self._called(compound, context, literals)])
        return node

    def _called(self, alternatives: list[Facts], context: Context, literals: Conditions) -> Node:
        key = context, *(facts.key() for facts in alternatives)
        if key not in self.rules:
            if len(self.rules) >= MOST_RULES:
                raise ConstraintError(
                    f"the schema describes more than {MOST_RULES} kinds of objects and arrays"
                )
            self.rules[key] = Rule(place_of(literals))
            self.ahead.append((self.rules[key], alternatives, context, literals))
        return Call(self.rules[key])

    def _bodies(self, alternatives: list[Facts], context: Context) -> Node:
        return either(self._body(facts, context) for facts in alternatives)

    def _body(self, facts: Facts, context: Context) -> Node:
        """The objects or arrays that meet conditions."""
        if facts.values is not None:
            left = (v for v in facts.values.values() if self.expansion.fits(facts, v, False))
            return either(self.constant(value, context) for value in left)
        return self.compound(facts, context)

    def _located(self, read: Callable[[], Node], literals: Conditions) -> Node:
        """Run a reader; its errors get a place if they name none."""
        try:
            return read()
        except ConstraintError as error:
            place = place_of(literals)  # may begin with an `$id`
            if names_a_place(str(error)) or str(error).startswith(place):
                raise
            raise ConstraintError(f"{short(place)}: {error}") from error


class JsonReader(SchemaReader[None]):
    """Values as JSON writes them."""

    def __init__(self, schema: Any, layout: JsonLayout) -> None:
        super().__init__(schema, None)
        part = partial(self.value, context=None)
        self.objects = ObjectWriter(self.expansion, layout, part)
        self.arrays = ArrayWriter(self.expansion, layout, part)

    def scalar(self, facts: Facts, context: None) -> Node:
        """See `scalar_language`."""
        return scalar_language(facts)

    def compound(self, facts: Facts, context: None) -> Node:
        """See the writers of arrays and objects."""
        return (self.objects if facts.kind == "object" else self.arrays).language(facts)

    def constant(self, value: Any, context: None) -> Node:
        """See `json_text`."""
        return literal(json_text(value))
