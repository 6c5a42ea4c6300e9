"""Express that a subschema does not hold, as a choice between conditions that may fail.

Nothing is offered by mistake, but some values may be left out: those that violate only

* a ``format``, ``uniqueItems``, ``unevaluatedItems`` or ``unevaluatedProperties``,
* an object in ``const`` or ``enum``, by having more properties,
* a ``oneOf`` of more than `MOST_PAIRED` schemas because two of them hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from canvas_grammar.grammar.json.facts import (
    Counted,
    Facts,
    Layer,
    Row,
    SomeMember,
    Trace,
    Words,
    counted,
    counts_of,
    number_facts,
    row_of,
)
from canvas_grammar.grammar.json.subschemas import OF_KIND, Literal, Subschema
from canvas_grammar.grammar.json.values import kind_of
from canvas_grammar.grammar.json_numbers import NumberFacts
from canvas_grammar.grammar.json_strings import StringFacts

MOST_PAIRED = 4
UNSAID = ("format", "uniqueItems", "unevaluatedItems", "unevaluatedProperties")
Change = Callable[[Facts, Trace], None]


@dataclass(frozen=True)
class Option:
    """One way to meet a condition: conditions that hold, and perhaps a change to the facts."""

    literals: tuple[Literal, ...] = ()
    change: Change | None = None


def changed(change: Callable[..., Any], *arguments: Any, **named: Any) -> Option:
    """An option that changes the facts: a function of them, and its other arguments."""
    return Option((), lambda facts, _: change(facts, *arguments, **named))


def violations(subschema: Subschema, words: Words, kind: str) -> tuple[list[Option], list[str]]:
    """How a value of one type may violate a subschema, and keywords whose violation cannot be said.

    The subschema must allow the type.
    """
    options: list[Option] = []
    types = subschema.types
    if kind == "number" and types is not None and "number" not in types:
        whole = NumberFacts(excluded=(NumberFacts(integer=True),))
        options.append(changed(Facts.measured, whole))
    for name in ("enum", "const"):
        if name in words:
            values = words["enum"] if name == "enum" else [words["const"]]
            options += _other_than(subschema, [v for v in values if kind_of(v) == kind], kind)
    options += BY_KIND[kind](subschema, words) if kind in BY_KIND else ()
    options += _combinations(subschema, words)
    return options, [name for name in UNSAID if name in words and name in OF_KIND[kind]]


def _combinations(subschema: Subschema, words: Words) -> Iterator[Option]:
    for n in range(len(words.get("allOf", ()))):
        yield Option((Literal(subschema.child("allOf", n), True),))
    for name in ("anyOf", "oneOf"):
        if name in words:
            inside = [Literal(subschema.child(name, n)) for n in range(len(words[name]))]
            yield Option(tuple(literal.opposite for literal in inside))
            if name == "oneOf" and len(inside) <= MOST_PAIRED:
                yield from (Option(pair) for pair in combinations(inside, 2))
    if "not" in words:
        yield Option((Literal(subschema.child("not")),))
    if "if" in words:
        condition = Literal(subschema.child("if"))
        if "then" in words:
            yield Option((condition, Literal(subschema.child("then"), True)))
        if "else" in words:
            yield Option((condition.opposite, Literal(subschema.child("else"), True)))


def _other_than(subschema: Subschema, values: list[Any], kind: str) -> Iterator[Option]:
    """How a value may differ from some others."""
    if kind not in ("array", "object"):
        yield changed(Facts.bar, values)
    elif len(values) != 1:
        # Each of them is handled by itself, one after the other.
        yield Option(tuple(Literal(subschema.constant(value), True) for value in values))
    elif kind == "array":
        (items,) = values
        yield changed(Facts.count, least=len(items) + 1)
        if items:
            yield changed(Facts.count, most=len(items) - 1)
        for n, item in enumerate(items):
            yield Option((), _wrong_item(n, Literal(subschema.constant(item), True)))
    else:
        (properties,) = values
        if not properties:
            yield changed(Facts.count, least=1)
        for name, value in properties.items():
            yield changed(Facts.lack, name)
            yield Option((), wrong_property(name, Literal(subschema.constant(value), True)))


def _string(subschema: Subschema, words: Words) -> Iterator[Option]:
    least, most = counts_of(words, "Length")
    if least > 0:
        yield changed(Facts.spelled, StringFacts(most=least - 1))
    if most is not None:
        yield changed(Facts.spelled, StringFacts(least=most + 1))
    if "pattern" in words:
        unlike = StringFacts(excluded=(StringFacts(patterns=(words["pattern"],)),))
        yield changed(Facts.spelled, unlike)


def _number(subschema: Subschema, words: Words) -> Iterator[Option]:
    for fact in number_facts(words):
        if fact.multiples:
            opposite = NumberFacts(excluded=(fact,))
        elif fact.least is not None:
            opposite = NumberFacts(most=fact.least, below=not fact.above)
        else:
            opposite = NumberFacts(least=fact.most, above=not fact.below)
        yield changed(Facts.measured, opposite)


def _counts(words: Words, what: str) -> Iterator[Option]:
    least, most = counts_of(words, what)
    if least > 0:
        yield changed(Facts.count, most=least - 1)
    if most is not None:
        yield changed(Facts.count, least=most + 1)


def _array(subschema: Subschema, words: Words) -> Iterator[Option]:
    yield from _counts(words, "Items")
    row = row_of(subschema, words)
    for n, literal in enumerate(row.first):
        if not literal.certain:
            yield Option((), _wrong_item(n, literal.opposite))
    if row.rest is not None and not row.rest.certain:
        wrong = row.rest.opposite
        if row.first:
            # Only the first of them is wrong.
            yield Option((), _wrong_item(len(row.first), wrong))
        else:
            yield changed(_add_counted, Counted(wrong, 1, None))
    if "contains" in words:
        inside = counted(subschema, words)
        if inside.least:
            yield changed(_add_counted, Counted(inside.item, 0, inside.least - 1))
        if inside.most is not None:
            yield changed(_add_counted, Counted(inside.item, inside.most + 1, None))


def _add_counted(facts: Facts, inside: Counted) -> None:
    facts.counted += (inside,)


def _wrong_item(n: int, wrong: Literal) -> Change:
    def change(facts: Facts, trace: Trace) -> None:
        facts.count(least=n + 1)
        anything = Literal(subschema_of_anything(trace.subschema))
        facts.rows += ((Row((*((anything,) * n), wrong), None), trace),)

    return change


def subschema_of_anything(subschema: Subschema) -> Subschema:
    """A subschema that allows every value."""
    return Subschema(True, subschema.place, subschema.around)


def _object(subschema: Subschema, words: Words) -> Iterator[Option]:
    yield from (changed(Facts.lack, name) for name in words.get("required", ()))
    yield from _counts(words, "Properties")
    for name in words.get("properties", ()):
        value = Literal(subschema.child("properties", name), True)
        if not value.hopeless:
            yield Option((), wrong_property(name, value))
    for pattern in words.get("patternProperties", ()):
        value = Literal(subschema.child("patternProperties", pattern), True)
        if not value.hopeless:
            yield changed(_add_some, SomeMember(value, matching=pattern))
    if "additionalProperties" in words and not subschema.child("additionalProperties").trivial:
        named = frozenset(words.get("properties", ()))
        value = Literal(subschema.child("additionalProperties"), True)
        unlike = tuple(words.get("patternProperties", ()))
        yield changed(_add_some, SomeMember(value, apart_from=named, unlike=unlike))
    if "propertyNames" in words and not subschema.child("propertyNames").trivial:
        naming = Literal(subschema.child("propertyNames"), True)
        yield changed(_add_some, SomeMember(naming=naming))
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needed in words.get(keyword, {}).items():
            if isinstance(needed, list):
                yield from (changed(_require_without, name, other) for other in needed)
            else:
                wrong = Literal(subschema.child(keyword, name), True)
                yield Option((wrong,), changed(Facts.require, name).change)


def _require_without(facts: Facts, name: str, other: str) -> None:
    facts.require(name)
    facts.lack(other)


def wrong_property(name: str, wrong: Literal) -> Change:
    """The property is there, and its value meets a condition."""

    def change(facts: Facts, trace: Trace) -> None:
        facts.require(name)
        facts.layers += ((Layer({name: wrong}), trace),)

    return change


def _add_some(facts: Facts, member: SomeMember) -> None:
    facts.some += (member,)


BY_KIND: dict[str, Callable[[Subschema, Words], Any]] = {
    "string": _string,
    "number": _number,
    "array": _array,
    "object": _object,
}
