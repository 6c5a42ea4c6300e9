"""Write the language of arrays.

The following is not offered:

* for several items that ``contains`` demands (or one, if `minItems`, `maxItems` or conditions on
  first items count as well), places other than next to each other, at the beginning or after the
  items that have separate conditions; and with ``maxContains``, more of them than ``minContains``
  says;
* with a ``maxItems`` above `MOST_COUNTED`, more items than these, unless `minItems` or items with
  fixed places demand them;
* with ``uniqueItems``, enumerated items in another order than the schema's; two or more other items
  that are not strings, numbers, booleans or null, or that are subject to conditions by place or
  ``contains``; and what `unlike_items` leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import comb

from canvas_grammar.grammar.json.expansion import Expansion
from canvas_grammar.grammar.json.facts import Counted, Facts
from canvas_grammar.grammar.json.subschemas import Literal, unique
from canvas_grammar.grammar.json.unlike_items import in_any_order, unlike_kinds
from canvas_grammar.grammar.json.values import JsonLayout, identity, json_text
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

MOST_SELECTIONS = 64
MOST_PLACED = 64
MOST_COUNTED = 256
Value = Callable[[tuple[Literal, ...]], Node]


class ArrayWriter:
    """Writes arrays; `value` gives the language of the values that meet some conditions."""

    def __init__(self, expansion: Expansion, layout: JsonLayout, value: Value) -> None:
        self.expansion, self.layout, self.value = expansion, layout, value

    def language(self, facts: Facts) -> Node:
        """The arrays that meet conditions which do not enumerate them.

        Raises:
            ConstraintError: a condition cannot be expressed.
        """
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
        others: Node = NOTHING
        if most is None or most > leading:
            others = self.layout.item(self._item(rest))
        room = None if most is None else most - leading
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
        if any(literal.hopeless for literal in literals):
            return NOTHING
        return self.value(literals)

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
        for start in sorted({0, facts.leading}):
            placed = {}
            length = max(start + len(demanded), facts.leading if rest else 0)
            for n in range(length):
                inside = start <= n < start + len(demanded)
                own = demanded[n - start] if inside else None
                more = [own.item] if own else []
                # An item that is counted elsewhere is counted only there.
                more += [c.item.opposite for c in all_counted if c.most is not None and c != own]
                if inside:
                    placed[n] = unique((*facts.of_item(n), *more))
            if rest and start > 0:
                continue
            others = unique((*facts.of_item(None), *rest))
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
        if not rest:
            return self._filled(facts, placed, others, facts.most)
        copy = facts.copy()
        for n in range(facts.leading):
            if n not in placed:
                placed[n] = unique((*facts.of_item(n), *rest))
        longest = max(placed, default=-1) + 1
        if facts.leading == 0 or longest <= facts.least:
            return self._filled(copy, placed, others, facts.most)
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
        if facts.least > most:
            return NOTHING
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
        if least <= 1 and most == len(items):
            chain = sequence(*(optional(item) for item in items))
            yield self.layout.bracketed("[]", chain, least == 0)
            return
        number = sum(comb(len(items), count) for count in range(least, most + 1))
        if most == len(items):
            number = comb(len(items), least)
        if number > MOST_SELECTIONS:
            raise ConstraintError(
                f"uniqueItems: minItems and maxItems allow {number} selections of items, at most "
                f"{MOST_SELECTIONS} are served"
            )
        for count in [least] if most == len(items) else range(least, most + 1):
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
                values = [None] if kind == "null" else [False, True] if kind == "boolean" else None
                if facts.values is not None:
                    values = list(facts.values.values())
                if values is None:
                    return None
                for value in values:
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
