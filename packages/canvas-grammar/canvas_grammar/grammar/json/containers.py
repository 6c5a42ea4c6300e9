"""Write the languages of objects and arrays.

Objects have named properties in the order of the schema, and then all others. Not offered are

* with ``minProperties``, objects that have enough properties only if two or more of them are
  unnamed (their names could be equal), unless there must be two or more such: then up to
  `MOST_KINDS` unnamed ones whose names begin with characters of different groups (see
  `unlike_kinds`) are offered, together with all named ones;
* with a ``maxProperties`` that leaves room for more than `MOST_COUNTED` properties without names,
  objects with more of these;
* with a ``maxProperties`` below the number of named properties, objects with both optional named
  and unnamed ones;
* with more than `MOST_PATTERNS` patterns, objects with an unnamed property that two of them match.

Of arrays, the following is not offered:

* for several items that ``contains`` demands (or one, if `minItems`, `maxItems` or conditions on
  first items count as well), places other than next to each other, at the beginning or after the
  items that have separate conditions; and with ``maxContains``, more of them than ``minContains``
  says;
* with a ``maxItems`` above `MOST_COUNTED`, more items than these, unless `minItems` or items with
  fixed places demand them;
* with ``uniqueItems``, enumerated items in another order than the schema's; two or more other items
  that are not strings, numbers, booleans or null, or that are subject to conditions by place or
  ``contains``; and what `unlike_kinds` leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

from canvas_grammar.grammar.json.expansion import Expansion
from canvas_grammar.grammar.json.facts import Counted, Facts, both_strings
from canvas_grammar.grammar.json.scalars import (
    MOST_KINDS,
    in_any_order,
    strings_without,
    unlike_kinds,
    unlike_strings,
)
from canvas_grammar.grammar.json.subschemas import Literal, unique
from canvas_grammar.grammar.json.values import JsonLayout, identity, json_text
from canvas_grammar.grammar.json_strings import StringFacts
from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Node,
    either,
    literal,
    optional,
    repeat,
    sequence,
)
from canvas_grammar.limits import ConstraintError

MOST_PATTERNS = 4  # every combination of which is distinguished
MOST_SELECTIONS = 64
MOST_PLACED = 64
MOST_COUNTED = 256
FEW_VALUES: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
Value = Callable[[tuple[Literal, ...]], Node]


class Member(NamedTuple):
    """A property with a name: a comma, the name and the value."""

    pair: Node
    required: bool


class _Writer:
    """Holds how `value` gives the language of the values that meet some conditions."""

    def __init__(self, expansion: Expansion, layout: JsonLayout, value: Value) -> None:
        self.expansion, self.layout, self.value = expansion, layout, value


class ObjectWriter(_Writer):
    """Writes objects."""

    def language(self, facts: Facts) -> Node:
        """The objects that meet conditions which do not enumerate them."""
        naming = [Facts("string")]
        if facts.names:
            naming = self.expansion.alternatives("string", facts.names)
        known = facts.known_names()
        if all(name.values is not None for name in naming):
            allowed = (v for name in naming for v in (name.values or {}).values())
            known = list(dict.fromkeys([*known, *allowed]))
            naming = []
        members = []
        for name in known:
            required = name in facts.required
            pair = self.layout.pair(self.layout.name(name), self._named(facts, name))
            if pair.empty and required:
                return NOTHING
            if not pair.empty:
                members.append(Member(pair, required))
        free = self._free(facts, naming, known)
        return either(self._selected(facts, members, free, partial(self._unlike, naming, known)))

    def _unlike(self, naming: list[Facts], known: list[str], facts: Facts) -> list[Node]:
        """Kinds of properties that no schema names; no name belongs to two of them."""
        kinds = []
        for group in range(MOST_KINDS):
            narrowed = [one.copy() for one in naming if one.values is None]
            for one in narrowed:
                one.spelled(unlike_strings(group))
            kinds.append(self._free(facts, [one for one in narrowed if not one.dead], known))
        return [kind for kind in kinds if not kind.empty]

    def _named(self, facts: Facts, name: str) -> Node:
        """The values of a property, if it may be there."""
        literals = facts.of_property(name)
        if name in facts.absent or any(literal.hopeless for literal in literals):
            return NOTHING
        if facts.names and not self.expansion.admits(facts.names, name):
            return NOTHING
        return self.named_value(name, literals)

    def named_value(self, name: str, literals: tuple[Literal, ...]) -> Node:
        """The values of a property that meet some conditions."""
        return self.value(literals)

    def _selected(
        self, facts: Facts, members: list[Member], free: Node, unlike: Callable[[Facts], list[Node]]
    ) -> Iterator[Node]:
        """Objects with as many properties as there must and may be."""
        required = sum(member.required for member in members)
        optional_ones = [n for n, member in enumerate(members) if not member.required]
        least, most = max(facts.least - required, 0), facts.most
        room = len(optional_ones) if most is None else most - required
        if room < 0:
            return
        if room < len(optional_ones):
            yield from self._some_of(members, optional_ones, (least, room), free)
            return
        more = None if most is None else min(room - len(optional_ones), MOST_COUNTED)
        extra = repeat(free, 0, more)
        if least == 0 or (least == 1 and required == 0):
            yield self._chain(members, extra, empty=least == required == 0)
        else:
            if least > len(optional_ones) + 1 and not free.empty:
                others, kinds = least - len(optional_ones), unlike(facts)
                if others > len(kinds):
                    raise ConstraintError(
                        f"minProperties asks for {others} properties that no schema names; at most "
                        f"{len(kinds)} are served here, because the names of more may be equal"
                    )
                every = [Member(member.pair, True) for member in members]
                yield self._chain(every, in_any_order(kinds, others, more), empty=False)
                return
            # Another property counts once, because its name may be repeated.
            if not free.empty and more != 0:
                some = repeat(free, 1, more)
                yield from self._at_least(members, optional_ones, least - 1, some)
            yield from self._at_least(members, optional_ones, least, extra)

    def _at_least(
        self, members: list[Member], optional_ones: list[int], least: int, extra: Node
    ) -> Iterator[Node]:
        """Objects with at least `least` >= 1 of the optional ones, and whatever `extra` demands."""
        self._check(comb(len(optional_ones), least), "minProperties")
        for some in combinations(optional_ones, least):
            chosen = [Member(m.pair, m.required or n in some) for n, m in enumerate(members)]
            yield self._chain(chosen, extra, empty=False)

    def _some_of(
        self, members: list[Member], optional_ones: list[int], counts: tuple[int, int], free: Node
    ) -> Iterator[Node]:
        """Objects with fewer properties than there are names."""
        least, room = counts
        self._check(comb(len(optional_ones), room), "maxProperties")
        for some in combinations(optional_ones, room):
            chosen = [m for n, m in enumerate(members) if m.required or n in some]
            inside = [n for n, m in enumerate(chosen) if not m.required]
            if least == 0:
                yield self._chain(chosen, EMPTY_TEXT, empty=len(inside) == len(chosen))
            else:
                yield from self._at_least(chosen, inside, least, EMPTY_TEXT)
        # Other properties take the place of all that may be left out.
        if room > 0 and not free.empty and least <= 1:
            chosen = [m for m in members if m.required]
            yield self._chain(chosen, repeat(free, 1, room), empty=False)

    def _check(self, selections: int, keyword: str) -> None:
        if selections > MOST_SELECTIONS:
            raise ConstraintError(
                f"{keyword} allows {selections} selections of properties, at most "
                f"{MOST_SELECTIONS} are served"
            )

    def _chain(self, members: list[Member], extra: Node, empty: bool) -> Node:
        parts = [m.pair if m.required else optional(m.pair) for m in members]
        return self.layout.bracketed("{}", sequence(*parts, extra), empty)

    def _free(self, facts: Facts, naming: list[Facts], known: list[str]) -> Node:
        """Properties that no schema names."""
        options = []
        for spelled, literals in self._classes(facts):
            if any(literal.hopeless for literal in literals):
                continue
            name = either(self.unnamed(both_strings(n.string, spelled), n, known) for n in naming)
            value = NOTHING if name.empty else self.value(literals)
            if not value.empty:
                options.append(self.layout.pair(name, value))
        return either(options)

    def unnamed(self, spelled: StringFacts, naming: Facts, known: list[str]) -> Node:
        """The names that meet conditions, without those that any condition names."""
        if naming.values is not None:
            others = [v for v in naming.values.values() if v not in known]
            return either(literal(json_text(value)) for value in others)
        return strings_without(spelled, [*known, *naming.barred.values()])

    def _classes(self, facts: Facts) -> Iterator[tuple[StringFacts, tuple[Literal, ...]]]:
        """Kinds of names by the patterns that they match, and conditions on the values of each."""
        patterns: dict[str, None] = {}
        for layer, _ in facts.layers:
            gates = layer.additional is not None and not layer.additional.certain
            for pattern, inside in layer.patterns.items():
                if gates or not inside.certain:
                    patterns[pattern] = None
        names = list(patterns)
        most_matched = len(names) if len(names) <= MOST_PATTERNS else 1
        for size in range(most_matched + 1):
            for matched in combinations(names, size):
                unmatched = (StringFacts(patterns=(p,)) for p in names if p not in matched)
                literals: list[Literal] = []
                for layer, _ in facts.layers:
                    some = [one for p, one in layer.patterns.items() if p in matched]
                    if not some and layer.additional:
                        some = [layer.additional]
                    literals += some
                yield StringFacts(patterns=matched, excluded=tuple(unmatched)), unique(literals)


class ArrayWriter(_Writer):
    """Writes arrays."""

    def language(self, facts: Facts) -> Node:
        """The arrays that meet conditions which do not enumerate them."""
        if facts.distinct and (facts.most is None or facts.most > 1):
            return self._distinct(facts)
        if facts.counted:
            return self._containing(facts)
        return self._filled(facts, {}, facts.of_item(None), facts.most)

    def _filled(
        self,
        facts: Facts,
        placed: dict[int, tuple[Literal, ...]],
        rest: tuple[Literal, ...],
        most: int | None,
    ) -> Node:
        """Arrays whose items have conditions by their place; those in `placed` must be there."""
        least = max(facts.least, max(placed, default=-1) + 1)
        leading = max(facts.leading, max(placed, default=-1) + 1)
        if most is not None:
            leading = min(leading, most)
            most = min(most, max(MOST_COUNTED, least, leading))
        if most is not None and most < least:
            return NOTHING
        first = [
            self.layout.item(self._item(placed.get(n) or facts.of_item(n))) for n in range(leading)
        ]
        room = None if most is None else most - leading
        others = NOTHING if room == 0 else self.layout.item(self._item(rest))
        inside = repeat(others, max(least - leading, 0), room)
        # This goes from the last item to the first, and each that may be missing ends the array.
        for n in range(leading - 1, -1, -1):
            inside = sequence(first[n], inside)
            if n >= least:
                inside = either([EMPTY_TEXT, inside]) if not inside.empty else EMPTY_TEXT
        if inside.empty:
            return NOTHING
        return self.layout.bracketed("[]", inside, least == 0)

    def _item(self, literals: tuple[Literal, ...]) -> Node:
        hopeless = any(literal.hopeless for literal in literals)
        return NOTHING if hopeless else self.value(literals)

    def _containing(self, facts: Facts) -> Node:
        """Arrays with certain items, which come first or after the first ones."""
        all_counted = _merged(facts.counted)
        if any(c.most is not None and c.most < c.least for c in all_counted):
            return NOTHING
        rest = [c.item.opposite for c in all_counted if c.most is not None]
        demanded = [counted for counted in all_counted for _ in range(counted.least)]
        if len(demanded) > MOST_PLACED:
            raise ConstraintError(f"contains is served for up to {MOST_PLACED} items")
        options = []
        if len(demanded) == 1 and not rest and facts.leading == 0 and facts.least <= 1:
            options.append(self._anywhere(facts, demanded[0]))
        others = unique((*facts.of_item(None), *rest))
        for start in [0] if rest else sorted({0, facts.leading}):
            placed = {}
            for n, own in enumerate(demanded, start):
                # An item that is counted elsewhere is counted only there.
                more = (c.item.opposite for c in all_counted if c.most is not None and c != own)
                placed[n] = unique((*facts.of_item(n), own.item, *more))
            options.append(self._bounded(facts, placed, others, rest))
        return either(options)

    def _anywhere(self, facts: Facts, counted: Counted) -> Node:
        """Arrays of any length with a certain item in any place."""
        if facts.most is not None:
            return NOTHING
        every = facts.of_item(None)
        others = repeat(self.layout.item(self._item(every)), 0, None)
        item = self.layout.item(self._item(unique((*every, counted.item))))
        return self.layout.bracketed("[]", sequence(others, item, others), empty=False)

    def _bounded(
        self,
        facts: Facts,
        placed: dict[int, tuple[Literal, ...]],
        others: tuple[Literal, ...],
        rest: list[Literal],
    ) -> Node:
        """Arrays with at most the allowed number of certain items; no other item is one of them."""
        if rest:
            for n in set(range(facts.leading)) - placed.keys():
                placed[n] = unique((*facts.of_item(n), *rest))
        if not rest or facts.leading == 0 or max(placed, default=-1) < facts.least:
            return self._filled(facts, placed, others, facts.most)
        raise ConstraintError("contains with a largest number beside prefixItems is not supported")

    def _distinct(self, facts: Facts) -> Node:
        """Arrays without equal items: of enumerated values, of unlike ones, or of one item."""
        literals = facts.of_item(None)
        alike = not facts.leading and not facts.counted
        values = self._enumerated(literals) if alike else None
        if values is None:
            kinds = unlike_kinds(self.expansion, literals) if alike else []
            if len(kinds) > 1 and facts.least <= len(kinds):
                inside = in_any_order(list(map(self.layout.item, kinds)), facts.least, facts.most)
                return self.layout.bracketed("[]", inside, facts.least == 0)
            return self._single(facts)
        items = [self.layout.item(literal(text)) for text in values]
        most = len(items) if facts.most is None else min(facts.most, len(items))
        return either(self._selections(items, facts.least, most))

    def _single(self, facts: Facts) -> Node:
        """Arrays of at most one item, which cannot have equal items."""
        if facts.least > 1:
            raise ConstraintError(
                f"uniqueItems is supported for {facts.least} items or more only if these are "
                "enumerated: nothing remembers which items were there"
            )
        single = facts.copy()
        single.distinct = False
        single.count(most=1)
        return self.language(single)

    def _selections(self, items: list[Node], least: int, most: int) -> Iterator[Node]:
        if least > most:
            return
        if least <= 1 and most == len(items):
            chain = sequence(*(optional(item) for item in items))
            yield self.layout.bracketed("[]", chain, least == 0)
            return
        counts = [least] if most == len(items) else range(least, most + 1)
        number = sum(comb(len(items), count) for count in counts)
        if number > MOST_SELECTIONS:
            raise ConstraintError(
                f"uniqueItems: minItems and maxItems allow {number} selections of items, at most "
                f"{MOST_SELECTIONS} are served"
            )
        for count in counts:
            for some in combinations(range(len(items)), count):
                parts = [
                    item if n in some else optional(item) if most == len(items) else EMPTY_TEXT
                    for n, item in enumerate(items)
                ]
                yield self.layout.bracketed("[]", sequence(*parts), count == 0)

    def _enumerated(self, literals: tuple[Literal, ...]) -> list[str] | None:
        """The values that meet conditions, written out, or None if they are not enumerated."""
        texts: dict[str, str] = {}
        for kind in self.expansion.kinds(literals):
            for facts in self.expansion.alternatives(kind, literals):
                if facts.values is None and kind not in FEW_VALUES:
                    return None
                left = facts.values
                for value in FEW_VALUES[kind] if left is None else left.values():
                    if self.expansion.fits(facts, value, False):
                        texts.setdefault(identity(value), json_text(value))
        return list(texts.values())


def _merged(some: tuple[Counted, ...]) -> list[Counted]:
    """One count for each condition."""
    merged: dict[Literal, Counted] = {}
    for one in some:
        if one.item in merged:
            other = merged[one.item]
            most = min((m for m in (one.most, other.most) if m is not None), default=None)
            one = Counted(one.item, max(one.least, other.least), most)
        merged[one.item] = one
    return list(merged.values())
