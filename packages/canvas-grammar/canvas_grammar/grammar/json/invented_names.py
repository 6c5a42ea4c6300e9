"""Names for properties that there must be, where no schema names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from canvas_grammar.grammar.ecma_parser import parse
from canvas_grammar.grammar.ecma_tree import (
    Alternatives,
    Characters,
    Repetition,
    Sequence,
    Tree,
)
from canvas_grammar.grammar.json_facts import StringFacts
from canvas_grammar.limits import ConstraintError

COMMON = ("a", "b", "c", "x", "0", "1", "", "aa", "aaaa", "aaaaaaaaaaaa")
MOST_PATTERNS = 8
LONGEST = 64


def suggested_names(conditions: Iterable[StringFacts], patterns: Iterable[str]) -> Iterator[str]:
    """Texts that may meet conditions, which the caller has to try.

    Args:
        conditions: on the name; one of them has to be met.
        patterns: what the name may have to match, or not.
    """
    known = dict.fromkeys(p for facts in conditions for p in facts.patterns)
    examples = []
    for pattern in list(known | dict.fromkeys(patterns))[:MOST_PATTERNS]:
        try:
            example = _example(parse(pattern))
        except ConstraintError:
            continue
        if len(example) <= LONGEST:
            examples.append(example)
    yield from dict.fromkeys((*examples, *map("".join, combinations(examples, 2)), *COMMON))


def _example(tree: Tree) -> str:
    """A short text that the tree matches, if it were for its assertions."""
    if isinstance(tree, Characters):
        readable = (chr(first) for first, last in tree.sure if first > 0x20)
        liked = (char for char in "a0A_" if any(f <= ord(char) <= t for f, t in tree.sure))
        return next(liked, None) or next(readable, "")
    if isinstance(tree, Sequence):
        return "".join(map(_example, tree.items))
    if isinstance(tree, Alternatives):
        return _example(tree.options[0])
    if isinstance(tree, Repetition):
        return _example(tree.item) * min(tree.least, LONGEST)
    return ""
