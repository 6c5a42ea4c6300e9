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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jsonschema
import jsonschema_rs
from jsonschema import validators
from referencing import Registry

PYTHON = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
RUST: dict[str, Any] = {
    "draft4": jsonschema_rs.Draft4Validator,
    "draft6": jsonschema_rs.Draft6Validator,
    "draft7": jsonschema_rs.Draft7Validator,
    "draft2019-09": jsonschema_rs.Draft201909Validator,
    "draft2020-12": jsonschema_rs.Draft202012Validator,
}
Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Judge:
    """The validators of one schema.

    Attributes:
        checks: by the validator's name. A validator that cannot read the schema is absent.
    """

    checks: Mapping[str, Check]

    @classmethod
    def of(cls, schema: Any, draft: str) -> Judge:
        """For a schema and a draft, a key of `DRAFTS`."""
        made: dict[str, Check] = {}
        for name, make in (("jsonschema", _python), ("jsonschema-rs", _rust)):
            with contextlib.suppress(Exception):  # of many kinds
                made[name] = make(schema, draft)
        return cls(made)

    def verdicts(self, value: Any) -> dict[str, bool | None]:
        """What each validator says of a value; None where it fails."""
        return {name: _verdict(check, value) for name, check in self.checks.items()}

    def complaint(self, text: bytes) -> str | None:
        """Why a text is not a valid instance, or None if it is one.

        Where an object has a name twice, the text is read twice, with the first and the last value.
        """
        try:
            readings = list(strict_readings(text))
        except ValueError as error:
            return f"not JSON: {error}"
        for value in readings:
            said = self.verdicts(value)
            if False in said.values():
                return "invalid for " + " and ".join(n for n, v in said.items() if v is False)
            if True not in said.values():
                return "no validator could read it"
        return None


def strict_readings(text: bytes) -> Iterator[Any]:
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


def _verdict(check: Check, value: Any) -> bool | None:
    try:
        return check(value)
    except Exception:
        return None


class DefectError(Exception):
    """A validator is known to read a schema in a wrong way."""


def _python(schema: Any, draft: str) -> Check:
    if draft == "draft2019-09" and _beside(schema, "additionalProperties", "unevaluatedProperties"):
        raise DefectError("additionalProperties beside unevaluatedProperties")
    kind = validators.extend(PYTHON[draft], {"multipleOf": _multiple_of})
    kind.check_schema(schema)
    made = kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())
    return made.is_valid  # type: ignore[no-any-return]


def _multiple_of(
    validator: Any, divisor: Any, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "number") and (_exact(value) / _exact(divisor)).denominator != 1:
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {divisor}")


def _exact(number: float) -> Fraction:
    """The number that the shortest spelling of a double names."""
    return Fraction(repr(number))


def _beside(schema: Any, *names: str) -> bool:
    """Whether some object in a schema has all these names."""
    if isinstance(schema, list):
        return any(_beside(part, *names) for part in schema)
    if not isinstance(schema, Mapping):
        return False
    return set(names) <= set(schema) or any(_beside(part, *names) for part in schema.values())


def _rust(schema: Any, draft: str) -> Check:
    made = RUST[draft](schema, validate_formats=True, offline=True)
    return made.is_valid
