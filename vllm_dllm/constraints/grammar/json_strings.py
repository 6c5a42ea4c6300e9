"""The language of strings that meet some conditions, thin: over `json_values`."""

from __future__ import annotations

from vllm_dllm.constraints.grammar.json_facts import StringFacts
from vllm_dllm.constraints.grammar.json_values import (
    string,
    string_of_format,
    string_of_pattern,
)
from vllm_dllm.constraints.grammar.language import NOTHING, Node
from vllm_dllm.constraints.grammar.rules import Both, Without
from vllm_dllm.constraints.limits import ConstraintError


def string_tree(facts: StringFacts) -> Node:
    """The strings that meet conditions, in quotes.

    Raises:
        ConstraintError: a condition cannot be expressed; the message names the keyword.
    """
    if facts.most is not None and facts.most < facts.least:
        return NOTHING
    parts = []
    try:
        parts += [string_of_pattern(pattern) for pattern in facts.patterns]
    except ConstraintError as error:
        raise ConstraintError(f"pattern: {error}") from error
    parts += [string_of_format(name) for name in facts.formats]
    if not parts or facts.least or facts.most is not None:
        parts.append(string(facts.least, facts.most))
    language = parts[0]
    for part in parts[1:]:
        language = Both(language, part)
    for other in facts.excluded:
        language = Without(language, string_tree(other))
    return language


def string_language(facts: StringFacts) -> Node:
    """As `string_tree`; the language may call rules.

    Raises:
        ConstraintError: see `string_tree`.
    """
    return string_tree(facts)
