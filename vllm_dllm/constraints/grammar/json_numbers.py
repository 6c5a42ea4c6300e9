"""The language of numbers that meet some conditions, thin: over `json_values`."""

from __future__ import annotations

import math

from vllm_dllm.constraints.grammar.json_facts import NumberFacts
from vllm_dllm.constraints.grammar.json_values import integer, number
from vllm_dllm.constraints.grammar.language import NOTHING, Node
from vllm_dllm.constraints.grammar.rules import Without
from vllm_dllm.constraints.limits import ConstraintError


def number_language(facts: NumberFacts) -> Node:
    """The numbers that meet conditions.

    Raises:
        ConstraintError: a condition cannot be expressed; the message names the keyword.
    """
    if any(step != 1 for step in facts.multiples):
        raise ConstraintError("multipleOf is not supported")
    low, high = facts.least, facts.most
    if low is not None and high is not None and low > high:
        return NOTHING
    if facts.integer or facts.multiples:
        least = None if low is None else math.floor(low) + 1 if facts.above else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if facts.below else math.floor(high)
        language = integer(least, most)
    else:
        least_float = None if low is None else float(low)
        most_float = None if high is None else float(high)
        language = number(least_float, most_float, facts.above, facts.below)
    for other in facts.excluded:
        # Fractions of zeros only are whole numbers too, so that they are not told apart here.
        if other.integer and not facts.integer:
            raise ConstraintError("a number that is no integer is not supported")
        if not facts.integer and other.least is not None and other.least == other.most:
            raise ConstraintError("a number that is not a constant is not supported")
        language = Without(language, number_language(other))
    return language
