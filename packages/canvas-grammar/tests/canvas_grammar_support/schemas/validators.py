"""Two validators that know nothing of this project: `jsonschema` (Python), `jsonschema_rs` (Rust).

A text is valid if both say so. Formats are asserted in every draft, because the strictest reading
is the one that an output must satisfy. Documents that are not in the schema are never fetched.

Two defects of `jsonschema` are kept out, because they refuse what is valid: it divides with
rounding for `multipleOf` (0.07 is no multiple of 0.01), which is replaced by exact arithmetic here;
and with draft 2019-09 it does not see what `additionalProperties` beside `unevaluatedProperties`
has evaluated, so it has no say about such schemas.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import jsonschema_rs
from jsonschema import validators
from referencing import Registry

VALIDATORS: dict[str, tuple[Any, Any]] = {
    "draft4": (jsonschema.Draft4Validator, jsonschema_rs.Draft4Validator),
    "draft6": (jsonschema.Draft6Validator, jsonschema_rs.Draft6Validator),
    "draft7": (jsonschema.Draft7Validator, jsonschema_rs.Draft7Validator),
    "draft2019-09": (jsonschema.Draft201909Validator, jsonschema_rs.Draft201909Validator),
    "draft2020-12": (jsonschema.Draft202012Validator, jsonschema_rs.Draft202012Validator),
}


class Judge:
    """The validators that can read a schema of a draft, a key of `VALIDATORS`."""

    def __init__(self, schema: Any, draft: str) -> None:
        python, rust = VALIDATORS[draft]
        self.checks: list[Any] = []
        evaluated = '"additionalProperties"', '"unevaluatedProperties"'
        if draft != "draft2019-09" or not all(name in json.dumps(schema) for name in evaluated):
            with contextlib.suppress(Exception):  # of many kinds
                kind = validators.extend(python, {"multipleOf": _multiple_of})
                kind.check_schema(schema)
                made = kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())
                self.checks.append(made)
        with contextlib.suppress(Exception):
            self.checks.append(rust(schema, validate_formats=True, offline=True))

    def complaint(self, text: bytes) -> str | None:
        """Why a text is not a valid instance, or None if it is one.

        Where an object has a name twice, the text is read twice, with the first and the last value.
        """
        try:
            readings = list(_strict_readings(text))
        except ValueError as error:
            return f"not JSON: {error}"
        for value in readings:
            verdicts = []
            for check in self.checks:
                with contextlib.suppress(Exception):
                    verdicts.append(check.is_valid(value))
            if not verdicts:
                return "no validator could read it"
            if not all(verdicts):
                return "invalid"
        return None


def _strict_readings(text: bytes) -> Iterator[Any]:
    """What JSON readers make of a text: one value, or two where an object has a name twice.

    Raises:
        ValueError: not JSON in UTF-8, a number beyond a double, or a lone surrogate.
    """
    repeated = False

    def last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        repeated = repeated or len(dict(pairs)) < len(pairs)
        return dict(pairs)

    def first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(reversed(pairs))

    written = text.decode("utf-8")
    for pairs_hook in (last, first):
        value = json.loads(
            written, object_pairs_hook=pairs_hook, parse_constant=_no_constant, parse_float=_finite
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate is no text
        yield value
        if not repeated:
            return


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond a double")
    return number


def _multiple_of(
    validator: Any, divisor: Any, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    # The numbers that the shortest spellings of doubles name.
    is_number = validator.is_type(value, "number")
    if is_number and (Fraction(repr(value)) / Fraction(repr(divisor))).denominator != 1:
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {divisor}")
