"""How single JSON values are written: strings, numbers within bounds, dates.

Only a part of what JSON allows is offered, chosen so that all readers agree on the value:
characters are escaped only where they must be, and numbers are so short that a double keeps them
apart from their bounds.
"""

from __future__ import annotations

import json
import math
from typing import Any

from vllm_dllm.constraints.grammar.language import (
    ANY,
    EMPTY_TEXT,
    NOTHING,
    Node,
    Ranges,
    chars,
    complement,
    either,
    intersection,
    literal,
    optional,
    repeat,
    sequence,
    union,
)
from vllm_dllm.constraints.grammar.regex import regex, searched
from vllm_dllm.constraints.limits import ConstraintError

DIGITS = 15  # of a number without bounds; a double has that many
FRACTION = 6  # digits after the point of a number with bounds
LARGEST_BOUND = 10**9  # of a number that need not be an integer: 15 digits with its fraction
LARGEST_INTEGER_BOUND = 10**30
SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
ESCAPED: Ranges = union([(0x0, 0x1F), *((ord(c), ord(c)) for c in SHORT_ESCAPES)])
DIGIT = chars([(0x30, 0x39)])
NOT_ZERO = chars([(0x31, 0x39)])

YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
# Years divisible by 4, but those divisible by 100 only if divisible by 400.
LEAP_YEAR = (
    r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)  # fmt: skip
DATE = (
    rf"(?a:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    rf"|{LEAP_YEAR}-02-29)"
)
TIME = r"(?a:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d))"
HEX = "[0-9a-fA-F]"
BYTE = r"(?a:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}",
    "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "email": (
        r"[a-zA-Z0-9_%+-]+(?:\.[a-zA-Z0-9_%+-]+)*@"
        r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)+"
    ),
}


def inside_string(ranges: Ranges) -> Node:
    """One character of `ranges` as it is written in a JSON string."""
    plain = chars(intersection(ranges, complement(ESCAPED)))
    escapes = []
    for first, last in intersection(ranges, ESCAPED):
        for code in range(first, last + 1):
            short = SHORT_ESCAPES.get(chr(code))
            escapes.append(literal(f"\\{short}" if short else f"\\u{code:04x}"))
    return either([plain, *escapes])


def _any_character(null: str) -> Node:
    """Any character as `inside_string` writes it; `null` is the last digit of the first escape."""
    plain = chars(complement(ESCAPED))
    short = sequence(literal("\\"), chars((ord(c), ord(c)) for c in SHORT_ESCAPES.values()))
    # The other controls: those below U+0010, and those from there on.
    low = sequence(literal("0"), chars([(ord(null), 0x37), (0x62, 0x62), (0x65, 0x66)]))
    high = sequence(literal("1"), chars([(0x30, 0x39), (0x61, 0x66)]))
    return either([plain, short, sequence(literal("\\u00"), either([low, high]))])


# An escaped U+0000 is allowed, because its escape contains no U+0000.
ANY_CHARACTER = _any_character(null="0")
# For sets of characters: since `ANY` lacks U+0000, nothing says whether a set contains it, so it is
# left out.
ANY_BUT_NULL = _any_character(null="1")
QUOTE = literal('"')


def string(least: int, most: int | None) -> Node:
    """A string of `least` to `most` characters."""
    return sequence(QUOTE, repeat(ANY_CHARACTER, least, most), QUOTE)


def string_of_pattern(pattern: str) -> Node:
    """A string in which a regular expression of a schema is found.

    Raises:
        ConstraintError: see `searched`.
    """
    return sequence(QUOTE, searched(pattern, _leaf, ANY_CHARACTER), QUOTE)


def string_of_format(name: str) -> Node:
    """A string of one of `FORMATS`.

    Raises:
        ConstraintError: the format is another one.
    """
    if name not in FORMATS:
        raise ConstraintError(
            f"format {name!r} is not supported; supported: {', '.join(sorted(FORMATS))}"
        )
    return sequence(QUOTE, regex(FORMATS[name]), QUOTE)


def _leaf(ranges: Ranges) -> Node:
    return ANY_BUT_NULL if ranges == ANY else inside_string(ranges)


def json_literal(value: Any) -> Node:
    """Exactly one value, written as by `json.dumps` with ``ensure_ascii=False``.

    Raises:
        ConstraintError: the value is not JSON.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"a value of the schema is no JSON: {error}") from error
    return literal(text)


def integer(least: int | None, most: int | None) -> Node:
    """An integer from `least` to `most`; without a bound it has at most `DIGITS` digits.

    Raises:
        ConstraintError: a bound is too large.
    """
    for bound in (least, most):
        if bound is not None and abs(bound) > LARGEST_INTEGER_BOUND:
            raise ConstraintError(f"integer bounds go up to {LARGEST_INTEGER_BOUND}, got {bound}")
    low = -_nines(-(most or 0)) if least is None else least
    high = _nines(least or 0) if most is None else most
    positive = between(max(low, 0), high)
    negative = sequence(literal("-"), between(max(-high, 1), -low))
    return either([positive, negative])


def _nines(beyond: int) -> int:
    """The largest integer of `DIGITS` digits, or of as many as `beyond` has."""
    return 10 ** max(DIGITS, len(str(max(beyond, 0)))) - 1


def number(least: float | None, most: float | None, above: bool, below: bool) -> Node:
    """A number from `least` to `most`; `above` and `below` exclude the bounds themselves.

    Without bounds it may have an exponent. With bounds it has no exponent and a fraction of up to
    `FRACTION` digits.

    Raises:
        ConstraintError: a bound is too large or not a whole number.
    """
    if least is None and most is None:
        whole = either([literal("0"), sequence(NOT_ZERO, repeat(DIGIT, 0, DIGITS - 1))])
        fraction = optional(sequence(literal("."), repeat(DIGIT, 1, DIGITS)))
        letters = chars([(0x45, 0x45), (0x65, 0x65)])
        sign = optional(chars([(0x2B, 0x2B), (0x2D, 0x2D)]))
        exponent = optional(sequence(letters, sign, repeat(DIGIT, 1, 2)))
        return sequence(optional(literal("-")), whole, fraction, exponent)
    for bound in (least, most):
        if bound is not None and (bound != int(bound) or abs(bound) > LARGEST_BOUND):
            raise ConstraintError(
                f"bounds of a number are whole numbers up to {LARGEST_BOUND}, got {bound}"
            )
    low = -LARGEST_BOUND if least is None else int(least)
    high = LARGEST_BOUND if most is None else int(most)
    positive = _magnitude(low, high, above, below)
    negative = _magnitude(-high, -low, below, above)
    return either([positive, sequence(literal("-"), negative)])


def _magnitude(low: int, high: int, above: bool, below: bool) -> Node:
    """A number without a sign, from `low` to `high`; `above` and `below` exclude the bounds."""
    if high < 0:
        return NOTHING
    if low < 0:
        low, above = 0, False
    point = literal(".")
    fraction = optional(sequence(point, repeat(DIGIT, 1, FRACTION)))
    options = []
    if above and low < high:
        more = sequence(repeat(DIGIT, 0, FRACTION - 1), NOT_ZERO)
        options.append(sequence(between(low, low), point, more))
    options.append(sequence(between(low + above, high - 1), fraction))
    if not below and (low < high or not above):
        zeros = repeat(literal("0"), 1, FRACTION)
        options.append(sequence(between(high, high), optional(sequence(point, zeros))))
    return either(options)


def between(low: int, high: int) -> Node:
    """The integers from `low` >= 0 to `high`, without leading zeros; none if `low` > `high`."""
    options = []
    while low <= high:
        # All numbers with as many digits as the lowest.
        last = min(high, 10 ** len(str(low)) - 1)
        options.append(_same_length(str(low), str(last)))
        low = last + 1
    return either(options)


def _same_length(low: str, high: str) -> Node:
    """The numbers from `low` to `high`, which have equally many digits; leading zeros count."""
    if not low:
        return EMPTY_TEXT
    if low[0] == high[0]:
        return sequence(literal(low[0]), _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    options = []
    if low[1:] != "0" * rest:
        options.append(sequence(literal(low[0]), _same_length(low[1:], "9" * rest)))
        first += 1
    behind = None
    if high[1:] != "9" * rest:
        behind = sequence(literal(high[0]), _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        middle = chars([(ord("0") + first, ord("0") + last)])
        options.append(sequence(middle, repeat(DIGIT, rest, rest)))
    return either([*options, *([] if behind is None else [behind])])


def whole_number(value: Any) -> int | None:
    """The integer that a JSON number is (1.0 is 1), or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        return None
    return int(value)
