"""Constants: which of them are equal, which type they have, and how one is written."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Any

from canvas_grammar.grammar.json_values import ESCAPED, SHORT_ESCAPES
from canvas_grammar.grammar.language import Node, chars, either, literal, sequence
from canvas_grammar.limits import ConstraintError

# What Python's dialect has and ECMA-262's has not, or means in another way.
FOREIGN = re.compile(r"\\[AZGbB0-9]|\(\?(?![:])")


def whole_number(value: Any) -> int | None:
    """The integer that a JSON number is (1.0 is 1), or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        return None
    return int(value)


def kind_of(value: Any) -> str:
    """The type of a JSON value, of which integers are none: they are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"


def identity(value: Any) -> str:
    """The same text for values that JSON Schema considers equal, such as 1 and 1.0, not true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(identity(part) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{identity(value[k])}' for k in sorted(value))}}}"
    return json.dumps(value)


def json_text(value: Any) -> str:
    """A value as `json.dumps` writes it with ``ensure_ascii=False``.

    Raises:
        ConstraintError: the value is not JSON.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"a value of the schema is no JSON: {error}") from error
    return text


def spellings(text: str) -> Node:
    """A JSON string in all the spellings that any language of strings here may have."""
    return sequence(literal('"'), *(_spelled(char) for char in text), literal('"'))


@lru_cache(maxsize=1024)
def _spelled(char: str) -> Node:
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:
        return literal(f"\\u{code:04x}")
    if not any(first <= code <= last for first, last in ESCAPED):
        return literal(char)
    digits = (chars((ord(c), ord(c)) for c in {d, d.upper()}) for d in f"{code:04x}")
    options = [sequence(literal("\\u"), *digits)]
    if char in SHORT_ESCAPES:
        options.append(literal(f"\\{SHORT_ESCAPES[char]}"))
    return either(options)


@lru_cache(maxsize=65536)
def found(pattern: str, text: str) -> bool | None:
    """Whether a pattern is found in a text; None if dialects of expressions may not agree."""
    expression = _compiled(pattern)
    if expression is None or not (text.isascii() and (text.isprintable())):
        return None
    return expression.search(text) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    if FOREIGN.search(pattern):
        return None
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None
