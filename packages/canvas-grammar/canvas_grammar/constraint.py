"""A constraint as a request carries it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from canvas_grammar.limits import CompileLimits, ConstraintError

KINDS = ("choice", "grammar", "json_object", "json_schema", "regex", "structural_tag")


@dataclass(frozen=True)
class Thought:
    """Free text that an output begins with, and that its constraint does not cover."""

    end: str  # the text that ends it
    without: tuple[str, ...] = ()  # further texts that it does not contain
    may_be_all: bool = False  # whether an output may also be a thought that is not ended


@dataclass(frozen=True)
class Constraint:
    """A request for structured output. Equal constraints have the same automaton.

    Attributes:
        kind: one of `KINDS`.
        text: a regular expression or a grammar, or JSON: a schema, a structural tag or a list of
            strings; it is ignored for a ``json_object``.
        whitespace: for schemas, a regular expression of the white space after opening brackets,
            colons and commas and before closing brackets. None stands for one optional space.
        depth: how deeply calls of rules may nest; None for the usual number.
        hides_special: the client gets the text without special tokens, so the texts of a structural
            tag are written without them.
        thought: what an output begins with; None if it begins with what the constraint describes.
    """

    kind: str
    text: str
    whitespace: str | None = None
    depth: int | None = None
    hides_special: bool = False
    thought: Thought | None = None

    @classmethod
    def from_value(
        cls,
        kind: str,
        value: Any,
        whitespace: str | None = None,
        limits: CompileLimits | None = None,
    ) -> Constraint:
        """Make one from a request's value: text, or a schema, tag or list of choices as JSON.

        Raises:
            ConstraintError: an unknown kind, more than ``limits.characters``, or not JSON.
        """
        limits = limits or CompileLimits()
        if kind not in KINDS:
            raise ConstraintError(f"no such constraint: {kind}; supported: {', '.join(KINDS)}")
        if whitespace is not None and kind not in ("json_object", "json_schema"):
            raise ConstraintError(f"white space is settled for json_schema, not for {kind}")
        if not isinstance(value, str):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConstraintError(f"{kind}: not JSON ({error})") from error
        constraint = cls(kind, value, whitespace)
        size = len(value) + len(whitespace or "")
        if size > limits.characters:
            raise ConstraintError(
                f"{kind} is {size} characters long, at most {limits.characters} are served"
            )
        return constraint
