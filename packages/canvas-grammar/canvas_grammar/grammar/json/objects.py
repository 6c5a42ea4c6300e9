"""Write the language of objects: named properties in the order of the schema, then all others.

The following objects are not offered: those whose properties come in another order, and

* with ``minProperties``, those that have enough properties only if two or more of them are unnamed
  (their names could be equal), unless there must be two or more such: then up to `MOST_KINDS`
  unnamed ones whose names begin with characters of different groups (see `unlike_items`) are
  offered, together with all named ones;
* with a ``maxProperties`` that leaves room for more than `MOST_COUNTED` properties without names,
  those with more of these;
* with a ``maxProperties`` below the number of named properties, those that have both optional named
  and unnamed ones;
* with more than `MOST_PATTERNS` patterns, those with an unnamed property that two patterns match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb

from canvas_grammar.grammar.json.expansion import Expansion
from canvas_grammar.grammar.json.facts import Facts, both_strings
from canvas_grammar.grammar.json.scalars import strings_without
from canvas_grammar.grammar.json.subschemas import Literal
from canvas_grammar.grammar.json.unlike_items import (
    MOST_KINDS,
    in_any_order,
    unlike_strings,
)
from canvas_grammar.grammar.json.values import JsonLayout, json_text
from canvas_grammar.grammar.json_facts import StringFacts
from canvas_grammar.grammar.language import (
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
MOST_COUNTED = 256
Value = Callable[[tuple[Literal, ...]], Node]


@dataclass(frozen=True)
class Member:
    """A property with a name.

    Attributes:
        pair: a comma, the name and the value.
        required: whether it must be there.
    """

    pair: Node
    required: bool


class ObjectWriter:
    """Writes objects; `value` gives the language of the values that meet some conditions."""

    def __init__(self, expansion: Expansion, layout: JsonLayout, value: Value) -> None:
        self.expansion, self.layout, self.value = expansion, layout, value

    def language(self, facts: Facts) -> Node:
        """The objects that meet conditions which do not enumerate them.

        Raises:
            ConstraintError: a condition cannot be expressed.
        """
        naming = self.expansion.alternatives("string", facts.names) if facts.names else [
            Facts("string")
        ]  # fmt: skip
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
        self,
        facts: Facts,
        members: list[Member],
        free: Node,
        unlike: Callable[[Facts], list[Node]],
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
        if least == 0:
            yield self._chain(members, extra, empty=required == 0)
        elif least == 1 and required == 0:
            yield self._chain(members, extra, empty=False)
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
        self,
        members: list[Member],
        optional_ones: list[int],
        counts: tuple[int, int],
        free: Node,
    ) -> Iterator[Node]:
        """Objects with fewer properties than there are names."""
        least, room = counts
        self._check(comb(len(optional_ones), room), "maxProperties")
        for some in combinations(optional_ones, room):
            chosen = [m for n, m in enumerate(members) if m.required or n in some]
            inside = [n for n, m in enumerate(chosen) if not m.required]
            empty = repeat(free, 0, 0)
            if least == 0:
                yield self._chain(chosen, empty, empty=not any(m.required for m in chosen))
            else:
                yield from self._at_least(chosen, inside, least, empty)
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
            names = [self.unnamed(both_strings(n.string, spelled), n, known) for n in naming]
            name = either(names)
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
        exhaustive = len(names) <= MOST_PATTERNS
        sizes = range(len(names) + 1) if exhaustive else range(2)
        for size in sizes:
            for matched in combinations(names, size):
                unmatched = tuple(
                    StringFacts(patterns=(name,)) for name in names if name not in matched
                )
                literals: dict[Literal, None] = {}
                for layer, _ in facts.layers:
                    some = [one for p, one in layer.patterns.items() if p in matched]
                    if not any(p in matched for p in layer.patterns) and layer.additional:
                        some = [layer.additional]
                    literals.update(dict.fromkeys(some))
                left = tuple(literal for literal in literals if not literal.certain)
                yield StringFacts(patterns=matched, excluded=unmatched), left
