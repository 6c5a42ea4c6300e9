"""What is settled last: properties and items that nothing evaluates, and properties to be found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from canvas_grammar.grammar.json.choices import Choice
from canvas_grammar.grammar.json.constants import found
from canvas_grammar.grammar.json.facts import Facts, Layer, Row, SomeMember, Trace
from canvas_grammar.grammar.json.invented_names import suggested_names
from canvas_grammar.grammar.json.negation import (
    Option,
    changed,
    part_of_anything,
    wrong_property,
)
from canvas_grammar.grammar.json.parts import Literal

if TYPE_CHECKING:
    from canvas_grammar.grammar.json.expansion import Expansion

MOST_MADE_UP = 3  # names for one property
MOST_SUGGESTED = 16


def settle_leftovers(facts: Facts) -> None:
    """Turn ``unevaluatedProperties`` and ``unevaluatedItems`` into layers and rows.

    What alternatives that were not chosen would evaluate does not count as evaluated. That leaves
    out some values.
    """
    for literal, where in facts.leftover:
        anything = Literal(part_of_anything(where.part))
        if facts.kind == "object":
            layers = [layer for layer, trace in facts.layers if trace.begins_with(where)]
            if any(layer.additional is not None for layer in layers):
                continue
            names = {name: anything for layer in layers for name in layer.properties}
            patterns = {pattern: anything for layer in layers for pattern in layer.patterns}
            facts.layers += ((Layer(names, patterns, literal), where),)
        else:
            rows = [row for row, trace in facts.rows if trace.begins_with(where)]
            if any(row.rest is not None for row in rows):
                continue
            first = max((len(row.first) for row in rows), default=0)
            facts.rows += ((Row((anything,) * first, literal), where),)
    facts.leftover = ()


def some_choice(expansion: Expansion, facts: Facts, over: bool) -> Choice:
    """The choice of a property that there must be; `facts` lose the condition.

    Properties that a schema names are tried. If none of these will do, so are a few names that are
    made up here. A property with another name is not offered.
    """
    member, facts.some = facts.some[0], facts.some[1:]
    part = (member.value or member.naming or facts.names[0]).part
    trace = Trace(part, None, False)
    known = facts.known_names()
    names = [name for name in known if _is_meant(expansion, facts, member, name)]
    closed = any(
        layer.additional is not None and layer.additional.hopeless and not layer.patterns
        for layer, _ in facts.layers
    )
    if not over and not closed and (not names or facts.least > len(facts.required)):
        others = (name for name in _suggested(expansion, facts, member) if name not in known)
        names += islice((n for n in others if _is_meant(expansion, facts, member, n)), MOST_MADE_UP)
    options = [
        changed(Facts.require, name)
        if member.value is None
        else Option((), wrong_property(name, member.value))
        for name in names
    ]
    return Choice(options, trace, part, () if closed else ("a property that no schema names",))


def _suggested(expansion: Expansion, facts: Facts, member: SomeMember) -> Iterator[str]:
    """Names that may do."""
    conditions = facts.names if member.naming is None else (*facts.names, member.naming)
    naming = expansion.alternatives("string", conditions) if conditions else []
    for one in naming:
        yield from islice((one.values or {}).values(), MOST_SUGGESTED)
    patterns = [pattern for layer, _ in facts.layers for pattern in layer.patterns]
    wanted = [member.matching] if member.matching is not None else []
    yield from suggested_names([one.string for one in naming], [*wanted, *patterns])


def _is_meant(expansion: Expansion, facts: Facts, member: SomeMember, name: str) -> bool:
    if name in facts.absent:
        return False
    if facts.names and name not in facts.required and not expansion.admits(facts.names, name):
        return False
    if member.naming is not None and not expansion.admits((member.naming,), name):
        return False
    if name in member.apart_from or any(found(p, name) is not False for p in member.unlike):
        return False
    return member.matching is None or found(member.matching, name) is True
