"""What is known about a value of one type: the conditions that hold for it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from canvas_grammar.grammar.json.subschemas import Literal, Subschema
from canvas_grammar.grammar.json.values import found, identity, kind_of
from canvas_grammar.grammar.json_numbers import NumberFacts
from canvas_grammar.grammar.json_strings import StringFacts

ANY_STRING, ANY_NUMBER = StringFacts(), NumberFacts()


@dataclass(frozen=True, eq=False)
class Trace:
    """How a condition was reached."""

    subschema: Subschema  # that says it
    above: Trace | None  # how that subschema was reached
    counts: bool  # whether all subschemas on the way hold, so that what they evaluate is evaluated

    def passes(self, subschema: Subschema) -> bool:
        """Whether a subschema is on the way."""
        trace: Trace | None = self
        while trace is not None and trace.subschema is not subschema:
            trace = trace.above
        return trace is not None

    def begins_with(self, other: Trace) -> bool:
        """Whether the other one is on the way to this one, and all between them holds."""
        trace: Trace | None = self
        while trace is not None and trace is not other:
            if not trace.counts:
                return False
            trace = trace.above
        return trace is other


@dataclass(frozen=True, eq=False)
class Layer:
    """The conditions of one schema on the properties of an object.

    They are by name, by a pattern of names, and on all others.
    """

    properties: Mapping[str, Literal]
    patterns: Mapping[str, Literal] = field(default_factory=dict)
    additional: Literal | None = None

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for layers that say the same."""
        return tuple(self.properties.items()), tuple(self.patterns.items()), self.additional


@dataclass(frozen=True)
class Row:
    """The conditions of one schema on the first items of an array, and on all others."""

    first: tuple[Literal, ...]
    rest: Literal | None


@dataclass(frozen=True)
class Counted:
    """At least `least` items, and at most `most`, meet a condition."""

    item: Literal
    least: int
    most: int | None


@dataclass(frozen=True)
class SomeMember:
    """There is a property with a certain name, and a value that meets a condition."""

    value: Literal | None = None
    matching: str | None = None  # a pattern that the name matches
    apart_from: frozenset[str] = frozenset()  # names that are not the name
    unlike: tuple[str, ...] = ()  # patterns that the name does not match
    naming: Literal | None = None  # a condition that the name meets


@dataclass
class Facts:
    """Conditions on a value of one type; those with a trace say how they were reached."""

    kind: str  # one of six; integers are numbers
    dead: bool = False  # whether no value is left
    values: dict[str, Any] | None = None  # those left, by their identity, if they are enumerated
    barred: dict[str, Any] = field(default_factory=dict)  # excluded values, by their identity
    string: StringFacts = ANY_STRING
    number: NumberFacts = ANY_NUMBER
    least: int = 0  # items or properties
    most: int | None = None
    layers: tuple[tuple[Layer, Trace], ...] = ()
    required: dict[str, None] = field(default_factory=dict)  # names, in order
    absent: frozenset[str] = frozenset()  # names that the object lacks
    names: tuple[Literal, ...] = ()  # conditions on all names
    some: tuple[SomeMember, ...] = ()  # properties that there must be
    rows: tuple[tuple[Row, Trace], ...] = ()
    counted: tuple[Counted, ...] = ()  # conditions on the number of certain items
    distinct: bool = False  # whether no two items are equal
    leftover: tuple[tuple[Literal, Trace], ...] = ()  # conditions on what nothing else evaluates

    def copy(self) -> Facts:
        """A copy of the facts, which may be changed."""
        return replace(self, required=dict(self.required), barred=dict(self.barred))

    def key(self) -> tuple[Any, ...]:
        """Equal for equal facts."""
        values = None if self.values is None else tuple(self.values)
        return (
            *(self.kind, values, tuple(sorted(self.barred)), self.string, self.number),
            *(self.least, self.most, tuple(layer.key for layer, _ in self.layers)),
            *(tuple(self.required), self.absent, self.names, self.some),
            *(tuple(row for row, _ in self.rows), self.counted, self.distinct),
        )

    def only(self, values: Iterable[Any]) -> None:
        """Allow only some values."""
        allowed = {identity(value): value for value in values}
        if self.values is not None:
            allowed = {key: value for key, value in self.values.items() if key in allowed}
        self.values = {key: v for key, v in allowed.items() if key not in self.barred}
        self.dead |= not self.values

    def bar(self, values: Iterable[Any]) -> None:
        """Exclude some values."""
        self.barred.update((identity(value), value) for value in values)
        if self.values is not None:
            self.only(self.values.values())

    def count(self, least: int = 0, most: int | None = None) -> None:
        """Bound the number of items or properties."""
        self.least = max(self.least, least)
        if most is not None:
            self.most = most if self.most is None else min(self.most, most)
        self.dead |= self.most is not None and self.most < self.least

    def spelled(self, more: StringFacts) -> None:
        """Add conditions on a string."""
        self.string = both_strings(self.string, more)
        most = self.string.most
        self.dead |= most is not None and most < self.string.least

    def measured(self, more: NumberFacts) -> None:
        """Add conditions on a number."""
        self.number = both_numbers(self.number, more)
        low, high = self.number.least, self.number.most
        if low is not None and high is not None:
            open_end = self.number.above or self.number.below
            self.dead |= low > high or (low == high and open_end)

    def require(self, *names: str) -> None:
        """Require properties."""
        self.required.update(dict.fromkeys(names))
        self.dead |= not self.absent.isdisjoint(names)

    def lack(self, name: str) -> None:
        """Forbid a property."""
        self.absent |= {name}
        self.dead |= name in self.required

    def known_names(self) -> list[str]:
        """The names that any condition names: in the order of the schemas, absent ones last."""
        names = dict.fromkeys(name for layer, _ in self.layers for name in layer.properties)
        more = (*self.required, *sorted(self.absent))
        return list(names | dict.fromkeys(more))

    def of_property(self, name: str, over: bool = False) -> tuple[Literal, ...]:
        """The conditions on the value of a property; `over` leaves out those that are not sure."""
        literals: dict[Literal, None] = {}
        for layer, _ in self.layers:
            covered = name in layer.properties
            if covered:
                literals[layer.properties[name]] = None
            maybe = False
            for pattern, literal in layer.patterns.items():
                matches = found(pattern, name)
                if matches or (matches is None and not over):
                    literals[literal] = None
                covered |= matches is True
                maybe |= matches is None
            if layer.additional is not None and not covered and not (maybe and over):
                literals[layer.additional] = None
        return tuple(literal for literal in literals if not literal.certain)

    def of_item(self, n: int | None) -> tuple[Literal, ...]:
        """The conditions on the n-th item; None stands for all beyond the first ones."""
        literals: dict[Literal, None] = {}
        for row, _ in self.rows:
            if n is not None and n < len(row.first):
                literals[row.first[n]] = None
            elif row.rest is not None:
                literals[row.rest] = None
        return tuple(literal for literal in literals if not literal.certain)

    @property
    def leading(self) -> int:
        """How many first items have separate conditions."""
        return max((len(row.first) for row, _ in self.rows), default=0)


def both_strings(one: StringFacts, other: StringFacts) -> StringFacts:
    """The conditions of both."""
    if other == ANY_STRING:
        return one
    return StringFacts(
        max(one.least, other.least),
        min((m for m in (one.most, other.most) if m is not None), default=None),
        tuple(dict.fromkeys((*one.patterns, *other.patterns))),
        tuple(dict.fromkeys((*one.formats, *other.formats))),
        tuple(dict.fromkeys((*one.excluded, *other.excluded))),
    )


def both_numbers(one: NumberFacts, other: NumberFacts) -> NumberFacts:
    """The conditions of both."""
    least, above = _tighter((one.least, one.above), (other.least, other.above), 1)
    most, below = _tighter((one.most, one.below), (other.most, other.below), -1)
    return NumberFacts(
        one.integer or other.integer,
        *(least, above, most, below),
        tuple(dict.fromkeys((*one.multiples, *other.multiples))),
        tuple(dict.fromkeys((*one.excluded, *other.excluded))),
    )


def _tighter(
    one: tuple[Fraction | None, bool], other: tuple[Fraction | None, bool], sign: int
) -> tuple[Fraction | None, bool]:
    if one[0] is None or other[0] is None:
        return other if one[0] is None else one
    return max(one, other, key=lambda bound: (sign * (bound[0] or 0), bound[1]))


def fits_string(facts: StringFacts, text: str) -> bool | None:
    """Whether a text meets conditions; None if that is not sure."""
    if len(text) < facts.least or (facts.most is not None and len(text) > facts.most):
        return False
    verdicts = [found(pattern, text) for pattern in facts.patterns]
    verdicts += [None for _ in facts.formats]
    for other in facts.excluded:
        verdict = fits_string(other, text)
        verdicts.append(None if verdict is None else not verdict)
    return False if False in verdicts else None if None in verdicts else True


# ---- The conditions of a subschema on the values of one type, keyword by keyword.

Words = Mapping[str, Any]
ARRAY_ROWS = ("items", "prefixItems", "additionalItems")
LAYERS = ("properties", "patternProperties", "additionalProperties")


def assert_keywords(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    """Add what a subschema says itself, without its combinations of other subschemas.

    Of its keywords, `words` count; `over` leaves out what is not sure.
    """
    subschema, kind = trace.subschema, facts.kind
    if not subschema.allows(kind):
        facts.dead = True
        return
    if kind == "number" and subschema.types is not None and "number" not in subschema.types:
        facts.measured(NumberFacts(integer=True))
    if "const" in words:
        facts.only([words["const"]] if kind_of(words["const"]) == kind else [])
    if "enum" in words:
        facts.only(value for value in words["enum"] if kind_of(value) == kind)
    if kind in BY_KIND:
        BY_KIND[kind](facts, words, trace, over)


def counts_of(words: Words, what: str, least: int = 0) -> tuple[int, int | None]:
    """The smallest and the largest number that keywords such as ``minItems`` say."""
    most = words.get(f"max{what}")
    return int(words.get(f"min{what}", least)), None if most is None else int(most)


def _string(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    if "minLength" in words or "maxLength" in words or "pattern" in words or "format" in words:
        patterns = (words["pattern"],) if "pattern" in words else ()
        formats = (words["format"],) if "format" in words and not over else ()
        facts.spelled(StringFacts(*counts_of(words, "Length"), patterns, formats))


def _number(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    for fact in number_facts(words):
        facts.measured(fact)


def number_facts(words: Words) -> list[NumberFacts]:
    """What each keyword says about a number; a flag counts as a part of its bound."""
    found = []
    for name, exclusive, end, flag in (
        ("minimum", "exclusiveMinimum", "least", "above"),
        ("maximum", "exclusiveMaximum", "most", "below"),
    ):
        strict = words.get(exclusive)
        bounds: list[dict[str, Any]] = []
        if name in words:
            bounds.append({end: exact(words[name]), flag: strict is True})
        if strict is not None and not isinstance(strict, bool):
            bounds.append({end: exact(strict), flag: True})
        found += [NumberFacts(**bound) for bound in bounds]
    if "multipleOf" in words:
        found.append(NumberFacts(multiples=(exact(words["multipleOf"]),)))
    return found


def exact(value: int | float) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    return Fraction(str(value))


def _array(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    facts.count(*counts_of(words, "Items"))
    if any(name in words for name in ARRAY_ROWS):
        facts.rows += ((row_of(trace.subschema, words), trace),)
    if "contains" in words:
        facts.counted += (counted(trace.subschema, words),)
    facts.distinct |= words.get("uniqueItems", False)
    if "unevaluatedItems" in words and not over:
        facts.leftover += ((Literal(trace.subschema.child("unevaluatedItems")), trace),)


def row_of(subschema: Subschema, words: Words) -> Row:
    """What a subschema says about the items of an array."""
    old = isinstance(words.get("items"), list)
    listed, others = ("items", "additionalItems") if old else ("prefixItems", "items")
    first = (Literal(subschema.child(listed, n)) for n in range(len(words.get(listed, ()))))
    return Row(tuple(first), Literal(subschema.child(others)) if others in words else None)


def counted(subschema: Subschema, words: Words) -> Counted:
    """The conditions of ``contains``."""
    least, most = counts_of(words, "Contains", 1)
    return Counted(Literal(subschema.child("contains")), least, most)


def _object(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    facts.count(*counts_of(words, "Properties"))
    facts.require(*words.get("required", ()))
    if any(name in words for name in LAYERS):
        layer = layer_of(trace.subschema, words)
        facts.layers += ((layer, trace),)
    if "propertyNames" in words:
        facts.names += (Literal(trace.subschema.child("propertyNames")),)
    if "unevaluatedProperties" in words and not over:
        facts.leftover += ((Literal(trace.subschema.child("unevaluatedProperties")), trace),)


def layer_of(subschema: Subschema, words: Words) -> Layer:
    """What a subschema says about the properties of an object."""
    if subschema.layer is None:
        named, matching = (
            {name: Literal(subschema.child(keyword, name)) for name in words.get(keyword, ())}
            for keyword in ("properties", "patternProperties")
        )
        is_closed = "additionalProperties" in words
        other = Literal(subschema.child("additionalProperties")) if is_closed else None
        subschema.layer = Layer(named, matching, other)
    return subschema.layer


BY_KIND: dict[str, Callable[[Facts, Words, Trace, bool], None]] = {
    "string": _string,
    "number": _number,
    "array": _array,
    "object": _object,
}
