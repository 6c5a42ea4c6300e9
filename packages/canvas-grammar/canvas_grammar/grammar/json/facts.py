"""What is known about a value of one type: the conditions that hold for it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from canvas_grammar.grammar.json.subschemas import Literal, Subschema
from canvas_grammar.grammar.json.values import found, identity, kind_of
from canvas_grammar.grammar.json_facts import NumberFacts, StringFacts

ANY_STRING, ANY_NUMBER = StringFacts(), NumberFacts()


@dataclass(frozen=True, eq=False)
class Trace:
    """How a condition was reached.

    Attributes:
        subschema: the subschema that says it.
        above: how that subschema was reached, or None for the first one.
        counts: whether all subschemas on the way hold, so that what they evaluate is evaluated.
    """

    subschema: Subschema
    above: Trace | None
    counts: bool

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

    Attributes:
        properties: conditions by name.
        patterns: conditions on the properties whose names match a pattern.
        additional: the condition on all others, or None.
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
    """The conditions of one schema on the items of an array.

    Attributes:
        first: conditions on the first items.
        rest: the condition on all others, or None.
    """

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
    """There is a property with a certain name, and a value that meets a condition.

    Attributes:
        value: the condition, or None.
        matching: a pattern that the name matches, or None.
        apart_from: names that are not the name.
        unlike: patterns that the name does not match.
        naming: a condition that the name meets, or None.
    """

    value: Literal | None = None
    matching: str | None = None
    apart_from: frozenset[str] = frozenset()
    unlike: tuple[str, ...] = ()
    naming: Literal | None = None


@dataclass
class Facts:
    """Conditions on a value of one type.

    Attributes:
        kind: the type, one of six; integers are numbers.
        dead: whether no value is left.
        values: the values that are left, by their identity, if they are enumerated.
        barred: values that are excluded, by their identity.
        string: conditions on a string.
        number: conditions on a number.
        least: the fewest items or properties.
        most: the most items or properties, or None.
        layers: conditions on properties, and how each was reached.
        required: names, in order.
        absent: names that the object lacks.
        names: conditions on all names.
        some: properties that there must be.
        rows: conditions on items, and how each was reached.
        counted: conditions on the number of certain items.
        distinct: whether no two items are equal.
        leftover: conditions on what nothing else evaluates, and where each was said.
    """

    kind: str
    dead: bool = False
    values: dict[str, Any] | None = None
    barred: dict[str, Any] = field(default_factory=dict)
    string: StringFacts = ANY_STRING
    number: NumberFacts = ANY_NUMBER
    least: int = 0
    most: int | None = None
    layers: tuple[tuple[Layer, Trace], ...] = ()
    required: dict[str, None] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    names: tuple[Literal, ...] = ()
    some: tuple[SomeMember, ...] = ()
    rows: tuple[tuple[Row, Trace], ...] = ()
    counted: tuple[Counted, ...] = ()
    distinct: bool = False
    leftover: tuple[tuple[Literal, Trace], ...] = ()

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


def fits_number(facts: NumberFacts, value: int | float) -> bool:
    """Whether a number meets conditions."""
    return facts.fits(Fraction(str(value)))


# ---- The conditions of a subschema on the values of one type, keyword by keyword.

Words = Mapping[str, Any]
ARRAY_ROWS = ("items", "prefixItems", "additionalItems")
LAYERS = ("properties", "patternProperties", "additionalProperties")


def assert_keywords(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    """Add what a subschema says itself, without its combinations of other subschemas.

    Args:
        facts: they are changed.
        words: the keywords that count.
        trace: how the subschema was reached.
        over: whether what is not sure is left out.
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
    BY_KIND[kind](facts, words, trace, over)


def _nothing(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    pass


def _string(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    if "minLength" in words or "maxLength" in words or "pattern" in words or "format" in words:
        most = words.get("maxLength")
        formats = (words["format"],) if "format" in words and not over else ()
        facts.spelled(
            StringFacts(
                int(words.get("minLength", 0)),
                None if most is None else int(most),
                (words["pattern"],) if "pattern" in words else (),
                formats,
            )
        )


def _number(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    for fact in number_facts(words).values():
        facts.measured(fact)


def number_facts(words: Words) -> dict[str, NumberFacts]:
    """By keyword, what each says about a number; a flag counts as a part of its bound."""
    found = {}
    for name, exclusive, end, flag in (
        ("minimum", "exclusiveMinimum", "least", "above"),
        ("maximum", "exclusiveMaximum", "most", "below"),
    ):
        strict = words.get(exclusive)
        if name in words:
            bound: dict[str, Any] = {end: exact(words[name]), flag: strict is True}
            found[name] = NumberFacts(**bound)
        if strict is not None and not isinstance(strict, bool):
            bound = {end: exact(strict), flag: True}
            found[exclusive] = NumberFacts(**bound)
    if "multipleOf" in words:
        found["multipleOf"] = NumberFacts(multiples=(exact(words["multipleOf"]),))
    return found


def exact(value: int | float) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    return Fraction(str(value))


def _array(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    most = words.get("maxItems")
    facts.count(int(words.get("minItems", 0)), None if most is None else int(most))
    if any(name in words for name in ARRAY_ROWS):
        facts.rows += ((row_of(trace.subschema, words), trace),)
    if "contains" in words:
        facts.counted += (counted(trace.subschema, words),)
    facts.distinct |= words.get("uniqueItems", False)
    if "unevaluatedItems" in words and not over:
        facts.leftover += ((Literal(trace.subschema.child("unevaluatedItems")), trace),)


def row_of(subschema: Subschema, words: Words) -> Row:
    """What a subschema says about the items of an array."""
    first: tuple[Literal, ...] = ()
    rest = None
    if isinstance(words.get("items"), list):
        first = tuple(Literal(subschema.child("items", n)) for n in range(len(words["items"])))
        if "additionalItems" in words:
            rest = Literal(subschema.child("additionalItems"))
    else:
        if "prefixItems" in words:
            first = tuple(
                Literal(subschema.child("prefixItems", n)) for n in range(len(words["prefixItems"]))
            )
        if "items" in words:
            rest = Literal(subschema.child("items"))
    return Row(first, rest)


def counted(subschema: Subschema, words: Words) -> Counted:
    """The conditions of ``contains``."""
    most = words.get("maxContains")
    return Counted(
        Literal(subschema.child("contains")),
        int(words.get("minContains", 1)),
        None if most is None else int(most),
    )


def _object(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    most = words.get("maxProperties")
    facts.count(int(words.get("minProperties", 0)), None if most is None else int(most))
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
        subschema.layer = Layer(
            {n: Literal(subschema.child("properties", n)) for n in words.get("properties", ())},
            {
                p: Literal(subschema.child("patternProperties", p))
                for p in words.get("patternProperties", ())
            },
            Literal(subschema.child("additionalProperties"))
            if "additionalProperties" in words
            else None,
        )
    return subschema.layer


BY_KIND: dict[str, Callable[[Facts, Words, Trace, bool], None]] = {
    "null": _nothing,
    "boolean": _nothing,
    "string": _string,
    "number": _number,
    "array": _array,
    "object": _object,
}
