"""What a part says about the values of one type, keyword by keyword."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from canvas_grammar.grammar.json.constants import kind_of
from canvas_grammar.grammar.json.facts import Counted, Facts, Layer, Row, Trace
from canvas_grammar.grammar.json.parts import Literal, Part
from canvas_grammar.grammar.json_facts import NumberFacts, StringFacts

Words = Mapping[str, Any]
ARRAY_ROWS = ("items", "prefixItems", "additionalItems")
LAYERS = ("properties", "patternProperties", "additionalProperties")


def assert_keywords(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    """Add what a part says itself, without its combinations of other parts.

    Args:
        facts: they are changed.
        words: the keywords that count.
        trace: how the part was reached.
        over: whether what is not sure is left out.
    """
    part, kind = trace.part, facts.kind
    if not part.allows(kind):
        facts.dead = True
        return
    if kind == "number" and part.types is not None and "number" not in part.types:
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
        facts.rows += ((row_of(trace.part, words), trace),)
    if "contains" in words:
        facts.counted += (counted(trace.part, words),)
    facts.distinct |= words.get("uniqueItems", False)
    if "unevaluatedItems" in words and not over:
        facts.leftover += ((Literal(trace.part.child("unevaluatedItems")), trace),)


def row_of(part: Part, words: Words) -> Row:
    """What a part says about the items of an array."""
    first: tuple[Literal, ...] = ()
    rest = None
    if isinstance(words.get("items"), list):
        first = tuple(Literal(part.child("items", n)) for n in range(len(words["items"])))
        if "additionalItems" in words:
            rest = Literal(part.child("additionalItems"))
    else:
        if "prefixItems" in words:
            first = tuple(
                Literal(part.child("prefixItems", n)) for n in range(len(words["prefixItems"]))
            )
        if "items" in words:
            rest = Literal(part.child("items"))
    return Row(first, rest)


def counted(part: Part, words: Words) -> Counted:
    """What ``contains`` says."""
    most = words.get("maxContains")
    return Counted(
        Literal(part.child("contains")),
        int(words.get("minContains", 1)),
        None if most is None else int(most),
    )


def _object(facts: Facts, words: Words, trace: Trace, over: bool) -> None:
    most = words.get("maxProperties")
    facts.count(int(words.get("minProperties", 0)), None if most is None else int(most))
    facts.require(*words.get("required", ()))
    if any(name in words for name in LAYERS):
        layer = layer_of(trace.part, words)
        facts.layers += ((layer, trace),)
    if "propertyNames" in words:
        facts.names += (Literal(trace.part.child("propertyNames")),)
    if "unevaluatedProperties" in words and not over:
        facts.leftover += ((Literal(trace.part.child("unevaluatedProperties")), trace),)


def layer_of(part: Part, words: Words) -> Layer:
    """What a part says about the properties of an object."""
    if part.layer is None:
        part.layer = Layer(
            {n: Literal(part.child("properties", n)) for n in words.get("properties", ())},
            {
                p: Literal(part.child("patternProperties", p))
                for p in words.get("patternProperties", ())
            },
            Literal(part.child("additionalProperties"))
            if "additionalProperties" in words
            else None,
        )
    return part.layer


BY_KIND: dict[str, Callable[[Facts, Words, Trace, bool], None]] = {
    "null": _nothing,
    "boolean": _nothing,
    "string": _string,
    "number": _number,
    "array": _array,
    "object": _object,
}
