"""Write the languages of strings, numbers, true, false and null, and of such values that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from canvas_grammar.grammar.free_text import ANYTHING
from canvas_grammar.grammar.json.expansion import Expansion
from canvas_grammar.grammar.json.facts import Facts, both_numbers, exact, fits_string
from canvas_grammar.grammar.json.subschemas import Literal
from canvas_grammar.grammar.json.values import json_text, spellings, whole_number
from canvas_grammar.grammar.json_numbers import NumberFacts, number_language, number_tree
from canvas_grammar.grammar.json_strings import FEW, StringFacts, string_language, string_tree
from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    LAST,
    NOTHING,
    Node,
    chars,
    either,
    literal,
    sequence,
)
from canvas_grammar.grammar.rules import Both, Call, Rule, both, without


def scalar_language(facts: Facts) -> Node:
    """The language of values that are neither arrays nor objects."""
    if facts.kind == "null":
        return NOTHING if facts.barred else literal("null")
    if facts.kind == "boolean":
        texts = [text for text in ("true", "false") if text not in facts.barred]
        return either(map(literal, texts if facts.values is None else facts.values))
    return _string(facts) if facts.kind == "string" else number_values(facts)


def _string(facts: Facts) -> Node:
    if facts.values is None:
        return strings_without(facts.string, list(facts.barred.values()))
    verdicts = {value: fits_string(facts.string, value) for value in facts.values.values()}
    options = [literal(json_text(value)) for value, verdict in verdicts.items() if verdict]
    unsure = [literal(json_text(v)) for v, verdict in verdicts.items() if verdict is None]
    if unsure:
        options.append(both(either(unsure), string_tree(facts.string)))
    return either(options)


def strings_without(facts: StringFacts, texts: list[str]) -> Node:
    """The strings that meet conditions, except some texts, however these are spelled."""
    # A text that certainly fails the conditions is not one of them anyway.
    texts = [text for text in texts if fits_string(facts, text) is not False]
    if not texts:
        return string_language(facts)
    tree = string_tree(facts)
    return without(tree, either(map(spellings, texts)))


def number_values(facts: Facts, write: Callable[[NumberFacts], Node] = number_language) -> Node:
    """The numbers that meet conditions; `write` gives them where none are enumerated."""
    if facts.values is None:
        barred = map(exact, facts.barred.values())
        excluded = tuple(NumberFacts(least=value, most=value) for value in barred)
        return write(both_numbers(facts.number, NumberFacts(excluded=excluded)))
    left = [value for value in facts.values.values() if facts.number.fits(exact(value))]
    # A whole number without its fraction is an integer in every draft.
    return either(
        literal(json_text(value if whole is None else whole))
        for value in left
        for whole in [whole_number(value) if facts.number.integer else None]
    )


# ---- Values that certainly differ, although nothing remembers which items came before.
#
# The possible items are divided into kinds that share no value, by type and by how the text begins.
# An array holds at most one item of each kind, in any order. So two items of the same kind, such as
# two strings whose first characters are in the same group, and numbers beyond 15 digits are not
# offered.

# Any selection of kinds in any order takes a rule for each set of kinds, so 2 to this power rules.
MOST_KINDS = 6
# Numbers of up to 15 digits: two of them that differ are two doubles.
FAR = NumberFacts(least=Fraction(1 - 10**15), most=Fraction(10**15 - 1))
BELOW_ZERO = NumberFacts(most=Fraction(0), below=True)
FROM_ZERO = NumberFacts(least=Fraction(0))


def unlike_kinds(expansion: Expansion, literals: tuple[Literal, ...]) -> list[Node]:
    """Languages of values that meet some conditions; no value belongs to two of them.

    There are at most `MOST_KINDS`, and none if a value may be an array or an object, or a string
    whose length is bounded by more than `FEW` characters: each automaton would be too large.
    """
    kinds = expansion.kinds(literals)
    found = {kind: expansion.alternatives(kind, literals) for kind in kinds}
    found = {kind: alternatives for kind, alternatives in found.items() if alternatives}
    lengths = ((one.string.least, one.string.most or 0) for one in found.get("string", ()))
    if found.keys() & {"array", "object"} or any(max(pair) > FEW for pair in lengths):
        return []
    simple = [kind for kind in found if kind in ("null", "boolean")]
    languages = [either(map(scalar_language, found[kind])) for kind in simple]
    left = [kind for kind in ("string", "number") if kind in found]
    for n, kind in enumerate(left):
        room = (MOST_KINDS - len(languages)) // (len(left) - n)
        divide = _strings if kind == "string" else _numbers
        languages += [divide(found[kind], group, room) for group in range(room)]
    return [language for language in languages if not language.empty]


def in_any_order(items: Sequence[Node], least: int, most: int | None) -> Node:
    """Sequences of `least` to `most` of some languages, each of them at most once."""
    rules: dict[int, Node] = {}
    every = (1 << len(items)) - 1
    most = len(items) if most is None else most
    for left in range(every + 1):  # what is left of a set is a smaller number
        used = len(items) - left.bit_count()
        options: list[Node] = [EMPTY_TEXT] if used >= least else []
        for n, item in enumerate(items):
            if left >> n & 1 and used < most:
                options.append(sequence(item, rules[left & ~(1 << n)]))
        body = either(options)
        # The first one is unchanged, because its first comma is taken away.
        plain = left == every or body.empty or body is EMPTY_TEXT
        rules[left] = body if plain else Call(Rule("unlike items", body))
    return rules[every]


def unlike_strings(group: int) -> StringFacts:
    """The strings whose first character is of one of `MOST_KINDS` groups, the empty one of 0."""
    first = "".join(f"\\u{{{low:x}}}-\\u{{{high:x}}}" for low, high in _group(group, MOST_KINDS))
    return StringFacts(patterns=(f"^(?:[{first}]|$)" if group == 0 else f"^[{first}]",))


def _group(group: int, groups: int) -> list[tuple[int, int]]:
    """Ranges of characters, such that adjacent letters belong to different groups."""
    members = [(code, code) for code in range(0x20, 0x7F) if code % 32 % groups == group]
    controls = [(0x1, 0x1F)] if group == 0 else []
    return [*controls, *members, *([(0x7F, LAST)] if group == groups - 1 else [])]


def _strings(alternatives: Iterable[Facts], group: int, groups: int) -> Node:
    """The strings that are written with a first character of a group, the empty one of 0."""
    found = map(scalar_language, alternatives)
    strings = either(one.rule.body if isinstance(one, Call) else one for one in found)
    # A quote after the first one ends the string, because as a character it follows a backslash.
    first = [pair for pair in _group(group, groups) if pair != (ord('"'), ord('"'))]
    begin = sequence(literal('"'), chars(first), ANYTHING)
    # No string is written in two ways, so the first one of an escape is as good as any.
    return Both(strings, either([begin, literal('""')]) if group == 0 else begin)


def _numbers(alternatives: Iterable[Facts], group: int, groups: int) -> Node:
    """The numbers below 0, or those whose first digit is of a group; all if there is one group."""
    negative = group == groups - 1
    options = []
    for facts in alternatives:
        narrowed = facts.copy()
        narrowed.measured(FAR)
        if groups > 1:
            narrowed.measured(BELOW_ZERO if negative else FROM_ZERO)
        if not narrowed.dead:
            options.append(number_values(narrowed, number_tree))
    numbers = either(options)
    if numbers.empty or negative:
        return numbers
    digits = [ord("0") + digit for digit in range(10) if digit % (groups - 1) == group]
    return Both(numbers, sequence(chars((digit, digit) for digit in digits), ANYTHING))
