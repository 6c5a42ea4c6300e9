"""Resolve references to places in the document and to the metaschemas of JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import exceptions

from canvas_grammar.grammar.json.subschemas import (
    LATEST,
    REFERENCES,
    SPECIFICATIONS,
    Draft,
    Literal,
    Subschema,
    Surroundings,
    draft_named,
)
from canvas_grammar.grammar.json.values import short
from canvas_grammar.limits import ConstraintError

# Errors that a malformed document may cause in the library.
MALFORMED = (AttributeError, TypeError, KeyError, IndexError, ValueError, RecursionError)


class Document:
    """A schema and its references. No object of it may occur in two places."""

    def __init__(self, schema: Any) -> None:
        # By keyword, the first place of each that is ignored.
        self.ignored: dict[str, str] = {}
        if not isinstance(schema, bool | Mapping):
            raise ConstraintError(f"$: a schema is an object, got {short(schema)}")
        named = draft_named(schema.get("$schema")) if isinstance(schema, Mapping) else None
        draft = named or LATEST
        # A number as a name, for example, is found where it matters.
        resource = SPECIFICATIONS[draft].create_resource(schema)
        try:
            resolver = REGISTRY.resolver_with_root(resource)
        except MALFORMED as error:
            raise ConstraintError(f"$: $id is a string: {error}") from error
        self._drafts: dict[int, tuple[Draft, bool]] = {}
        self._learn(schema, draft, named is not None)
        self._subschemas: dict[int, Subschema] = {}
        around = Surroundings(resolver, draft, named is not None, self.ignored, self._subschemas)
        self.root = Subschema.at(schema, "$", around)

    def _learn(self, schema: Any, draft: Draft, declared: bool) -> None:
        """Note the draft of each object of a document."""
        ahead: list[tuple[Any, Draft, bool]] = [(schema, draft, declared)]
        while ahead:
            value, draft, declared = ahead.pop()
            if isinstance(value, Mapping):
                named = draft_named(value.get("$schema"))
                if named is not None:
                    draft, declared = named, True
                self._drafts[id(value)] = draft, declared
                ahead += ((child, draft, declared) for child in value.values())
            elif isinstance(value, list):
                ahead += ((child, draft, declared) for child in value)

    def target(self, subschema: Subschema, keyword: str) -> Subschema:
        """The target of a reference of a subschema, which must not lead out of the document."""
        name = subschema.keywords[keyword]
        try:
            found = subschema.around.resolver.lookup(name)
            value, resolver = found.contents, found.resolver
            if keyword != "$ref":
                self._check_fixed(subschema, keyword, value)
            if isinstance(value, Mapping) and id(value) not in self._drafts:
                whole = resolver.lookup("#").contents
                self._learn(whole, draft_named(whole.get("$schema")) or LATEST, True)
        except exceptions.PointerToNowhere as error:
            raise subschema.complain(f"{keyword} {short(name)} leads nowhere") from error
        except exceptions.Unresolvable as error:
            raise subschema.complain(
                f"{keyword} {short(name)} is not supported; places in the same schema are, and "
                "JSON Schema's own metaschemas"
            ) from error
        except MALFORMED as error:
            refusal = f"{keyword} {short(name)} leads to no schema ({error})"
            raise subschema.complain(refusal) from error
        if not isinstance(value, bool | Mapping):
            raise subschema.complain(f"{keyword} {short(name)} leads to no schema")
        draft, declared = self._drafts.get(id(value), (LATEST, False))
        around = Surroundings(resolver, draft, declared, self.ignored, self._subschemas)
        return Subschema.at(value, short(name), around)

    def _check_fixed(self, subschema: Subschema, keyword: str, value: Any) -> None:
        """Refuse a reference whose target depends on the way that leads to it."""
        mark = "$dynamicAnchor" if keyword == "$dynamicRef" else "$recursiveAnchor"
        if isinstance(value, Mapping) and mark in value:
            marks = 0
            ahead = [self.root.value]
            while ahead:
                inner = ahead.pop()
                if isinstance(inner, Mapping):
                    marks += mark in inner
                    ahead += inner.values()
                elif isinstance(inner, list):
                    ahead += inner
            if marks != 1 or id(value) not in self._drafts:
                raise subschema.complain(
                    f"{keyword} is supported where only one schema has a {mark}"
                )

    def plain(self, literal: Literal) -> Literal:
        """The condition that a chain of references leads to, if they say nothing else."""
        passed = set()
        while len(literal.subschema.keywords) == 1:
            (keyword,) = literal.subschema.keywords
            subschema = literal.subschema
            if keyword in REFERENCES:
                if subschema in passed:
                    raise circular(subschema, keyword)
                passed.add(subschema)
                target = self.target(subschema, keyword)
            elif keyword == "allOf" and len(subschema.keywords["allOf"]) == 1:
                target = subschema.child("allOf", 0)
            else:
                break
            literal = Literal(target, literal.negated)
        return literal


def circular(subschema: Subschema, keyword: str) -> ConstraintError:
    """The error about a reference that leads back to itself."""
    return subschema.complain(
        f"{keyword} {short(subschema.keywords[keyword])} leads back to where it is used before any "
        "part of the value is read, which JSON Schema leaves without a meaning"
    )
