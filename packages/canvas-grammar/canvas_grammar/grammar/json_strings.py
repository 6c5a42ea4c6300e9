r"""Write the strings that have all properties that a schema names, as they are spelled in JSON.

The following is not offered:

* if more than `LONGEST_COUNTED` characters are allowed, but not any number, strings longer than
  that, unless longer ones are demanded or a pattern bounds the length as well;
* if more than `FEW` characters are counted, the escapes of controls that have no short escape
  (``\u0001``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce

from canvas_grammar.grammar.ecma import Repetition, Sequence, Tree, parse
from canvas_grammar.grammar.ecma_language import Writing, found_in, matched_by, whole_text
from canvas_grammar.grammar.json.values import (
    ANY_BUT_CONTROLS,
    ANY_BUT_NULL,
    ANY_CHARACTER,
    QUOTE,
    inside_string,
)
from canvas_grammar.grammar.json_formats import AUTOMATA
from canvas_grammar.grammar.language import ANY, NOTHING, Node, Ranges, chars, repeat, sequence
from canvas_grammar.grammar.rules import REMEMBERED, both, shared, without
from canvas_grammar.limits import ConstraintError

# Each character that is counted takes nine states of an automaton.
LONGEST_COUNTED = 512
FEW = 16
MOST_SHOWN = 200  # characters of a pattern in a message


@dataclass(frozen=True)
class StringFacts:
    """What a schema's keywords together say about a string.

    Attributes:
        least: characters (code points) that a string has at least.
        most: characters that it has at most; None means any number.
        patterns: regular expressions of JSON Schema, each of which is found in it.
        formats: names of formats that it has.
        excluded: a string that has the properties of any of these is left out.
    """

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: tuple[StringFacts, ...] = ()


@dataclass(frozen=True)
class Spelling:
    """How the characters of a string are written: those of ranges, and any one.

    Any one is a `nonzero` one in strings with conditions, and a `counted` one in those of counted
    lengths.
    """

    leaf: Callable[[Ranges], Node]
    character: Node
    nonzero: Node
    counted: Node


def _leaf(ranges: Ranges) -> Node:
    return ANY_BUT_NULL if ranges == ANY else inside_string(ranges)


ESCAPED = Spelling(_leaf, ANY_CHARACTER, ANY_BUT_NULL, ANY_BUT_CONTROLS)
# Characters that stand for themselves.
RAW = Spelling(chars, chars(ANY), chars(ANY), chars(ANY))


@lru_cache(REMEMBERED)
def string_language(facts: StringFacts) -> Node:
    """The strings with these properties; equal facts give the same node."""
    return shared("string", string_tree(facts))


@lru_cache(REMEMBERED)
def string_tree(facts: StringFacts) -> Node:
    """The same as `string_language` without a call of a rule, so that it may be part of `Both`."""
    return sequence(QUOTE, string_content(facts), QUOTE)


def string_content(
    facts: StringFacts, spelling: Spelling = ESCAPED, overapproximate: bool = False
) -> Node:
    """What stands between the quotes of `string_tree`.

    To overapproximate, a string need only meet the conditions for some reader, see `ecma_language`.

    Raises:
        ConstraintError: no automaton can follow a pattern, or what is excluded cannot be
            distinguished.
    """
    facts = _without_lengths_excluded(facts)
    if facts.most is not None and facts.most < facts.least:
        return NOTHING
    language = reduce(both, _languages(facts, overapproximate, spelling))
    for excluded in facts.excluded:
        only_formats = excluded.formats and not excluded.patterns and not excluded.excluded
        if only_formats and not overapproximate:
            raise ConstraintError(
                f"format {excluded.formats[0]!r} cannot be excluded: readers disagree on it"
            )
        if not language.empty:
            language = without(language, string_content(excluded, spelling, not overapproximate))
    return language


def _without_lengths_excluded(facts: StringFacts) -> StringFacts:
    """Facts in which an excluded range of lengths with one end is turned into a bound."""
    least, most, others = facts.least, facts.most, []
    for one in facts.excluded:
        if one.patterns or one.formats or one.excluded or (one.least and one.most is not None):
            others.append(one)
        elif one.most is not None:
            least = max(least, one.most + 1)
        else:
            most = one.least - 1 if most is None else min(most, one.least - 1)
    return StringFacts(least, most, facts.patterns, facts.formats, tuple(others))


def _conditions(facts: StringFacts, overapproximate: bool) -> list[tuple[str, Tree]]:
    """The patterns of facts, and their formats as patterns, each with what messages call it."""
    found = []
    for pattern in dict.fromkeys(facts.patterns):
        shown = pattern if len(pattern) <= MOST_SHOWN else f"{pattern[:MOST_SHOWN]}..."
        with _named(name := f"pattern {shown!r}"):
            found.append((name, parse(pattern)))
    # Any text may have a format, for a reader who takes formats for annotations.
    names = () if overapproximate else dict.fromkeys(facts.formats)
    known = ((f"format {name!r}", AUTOMATA[name]) for name in names if name in AUTOMATA)
    return [*found, *((name, parse(f"^(?:{text})$")) for name, text in known)]


def _languages(facts: StringFacts, overapproximate: bool, spelling: Spelling) -> Iterable[Node]:
    """Languages whose intersection is the strings."""
    writing = Writing(spelling.leaf, spelling.nonzero)
    conditions = _conditions(facts, overapproximate)
    counts = _at_hand(conditions, (facts.least, facts.most), overapproximate)
    counted = False
    for name, tree in conditions:
        content = whole_text(tree)
        clipped = None
        if content is not None and not counted and not overapproximate:
            clipped = _clipped(content, *counts)
        counted |= clipped is not None
        with _named(name):
            yield (
                matched_by(clipped, writing)
                if clipped
                else found_in(tree, writing, overapproximate)
            )
    if not counted and (not conditions or counts != (0, None)):
        least, most = counts
        character = spelling.nonzero if conditions or facts.excluded else spelling.character
        if max(least, most or 0) > FEW and not overapproximate:
            character = spelling.counted
        yield repeat(character, least, most)


def _at_hand(
    conditions: list[tuple[str, Tree]], counts: tuple[int, int | None], overapproximate: bool
) -> tuple[int, int | None]:
    """Lengths that are few enough to be counted: fewer than asked for; more to overapproximate."""
    least, most = counts
    if overapproximate:
        far = most is not None and most > LONGEST_COUNTED
        return min(least, LONGEST_COUNTED), None if far else most
    bounded = (content.width[1] for _, tree in conditions if (content := whole_text(tree)))
    if most is None or any(widest is not None and widest <= most for widest in bounded):
        return counts
    demanded = max((tree.width[0] for _, tree in conditions), default=0)
    return least, min(most, max(LONGEST_COUNTED, least, demanded))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Make refusals say what they are about."""
    try:
        yield
    except ConstraintError as error:
        raise ConstraintError(f"{name}: {error}") from error


def _clipped(tree: Tree, least: int, most: int | None) -> Tree | None:
    """The tree of those matches that have `least` to `most` characters, where that is simple."""
    narrowest, widest = tree.width
    if least <= narrowest and (most is None or (widest is not None and widest <= most)):
        return tree
    items = tree.items if isinstance(tree, Sequence) else (tree,)
    open_items = [n for n, item in enumerate(items) if item.width[0] != item.width[1]]
    if len(open_items) != 1:
        return None
    (place,) = open_items
    item = items[place]
    fixed = sum(other.width[0] for n, other in enumerate(items) if n != place)
    least, most = max(0, least - fixed), None if most is None else most - fixed
    clipped: Tree | None = None
    if isinstance(item, Repetition) and item.item.width == (1, 1):
        ends = [end for end in (item.most, most) if end is not None]
        clipped = Repetition(item.item, max(item.least, least), min(ends, default=None))
    elif isinstance(item, Sequence):
        clipped = _clipped(item, least, most)
    return None if clipped is None else Sequence((*items[:place], clipped, *items[place + 1 :]))
