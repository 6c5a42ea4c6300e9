"""Write the languages of strings, numbers, true, false and null."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from canvas_grammar.grammar.json.facts import (
    Facts,
    both_numbers,
    exact,
    fits_number,
    fits_string,
)
from canvas_grammar.grammar.json.values import json_text, spellings, whole_number
from canvas_grammar.grammar.json_facts import NumberFacts, StringFacts
from canvas_grammar.grammar.json_numbers import number_language
from canvas_grammar.grammar.json_strings import string_language, string_tree
from canvas_grammar.grammar.language import NOTHING, Node, either, literal
from canvas_grammar.grammar.rules import Both, Without

strings = lru_cache(maxsize=4096)(string_language)
trees = lru_cache(maxsize=4096)(string_tree)
numbers = lru_cache(maxsize=4096)(number_language)


def scalar_language(facts: Facts) -> Node:
    """The language of values that are neither arrays nor objects.

    Raises:
        ConstraintError: a keyword cannot be expressed.
    """
    if facts.kind == "null":
        return NOTHING if facts.barred else literal("null")
    if facts.kind == "boolean":
        left = (value for value in (True, False) if json_text(value) not in facts.barred)
        if facts.values is not None:
            left = (value for value in facts.values.values())
        return either(literal(json_text(value)) for value in left)
    return _string(facts) if facts.kind == "string" else number_values(facts)


def _string(facts: Facts) -> Node:
    if facts.values is None:
        return strings_without(facts.string, list(facts.barred.values()))
    sure: list[Node] = []
    unsure: list[Node] = []
    for value in facts.values.values():
        verdict = fits_string(facts.string, value)
        if verdict is not False:
            (sure if verdict else unsure).append(literal(json_text(value)))
    if unsure:
        sure.append(Both(either(unsure), trees(facts.string)))
    return either(sure)


def strings_without(facts: StringFacts, texts: list[str]) -> Node:
    """The strings that meet conditions, except some texts, however these are spelled."""
    # A text that certainly fails the conditions is not one of them anyway.
    texts = [text for text in texts if fits_string(facts, text) is not False]
    if not texts:
        return strings(facts)
    tree = trees(facts)
    return NOTHING if tree.empty else Without(tree, either(map(spellings, texts)))


def number_values(facts: Facts, write: Callable[[NumberFacts], Node] = numbers) -> Node:
    """The numbers that meet conditions.

    Args:
        facts: the conditions.
        write: the language of the numbers that meet conditions which enumerate none.

    Raises:
        ConstraintError: a keyword cannot be expressed.
    """
    if facts.values is None:
        barred = map(exact, facts.barred.values())
        excluded = tuple(NumberFacts(least=value, most=value) for value in barred)
        return write(both_numbers(facts.number, NumberFacts(excluded=excluded)))
    left = [value for value in facts.values.values() if fits_number(facts.number, value)]
    # A whole number without its fraction is an integer in every draft.
    return either(
        literal(json_text(value if whole is None else whole))
        for value in left
        for whole in [whole_number(value) if facts.number.integer else None]
    )
