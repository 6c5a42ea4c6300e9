"""What a ``$ref`` leads to: places in the document, or in the part of it that has an ``$id``.

A schema with an ``$id`` of its own inside of another one is a document of its own: ``#/$defs/a`` in
it means its own definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from vllm_dllm.constraints.grammar.json_drafts import LATEST, Draft, draft_named
from vllm_dllm.constraints.grammar.json_layout import short
from vllm_dllm.constraints.limits import ConstraintError

# Keywords whose names are names of schemas, and keywords whose values are no schemas.
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
DATA = {"const", "enum", "default", "examples"}


@dataclass(frozen=True)
class Scope:
    """Where a schema stands.

    Attributes:
        root: the document that a ``$ref`` in it speaks of.
        draft: what its keywords mean.
    """

    root: Any
    draft: Draft = LATEST


class References:
    """Of one document, whose parts are told apart by their identity.

    Args:
        document: JSON; no part of it is in two places.
    """

    def __init__(self, document: Any) -> None:
        self._outermost = Scope(document)
        self._scopes: dict[int, Scope] = {}
        self._copies: list[Any] = []
        # (a part, its surroundings, whether it is a table of named schemas)
        ahead: list[tuple[Any, Scope, bool]] = [(document, self._outermost, False)]
        while ahead:
            part, scope, names = ahead.pop()
            if isinstance(part, Mapping):
                scope = scope if names else _inside(part, scope)
                self._scopes[id(part)] = scope
                ahead += ((held, scope, table) for held, table in _held(part, names))
            elif isinstance(part, list):
                ahead += ((held, scope, False) for held in part)

    def scope(self, schema: Mapping[str, Any]) -> Scope:
        """Where a schema of the document stands."""
        return self._scopes.get(id(schema), self._outermost)

    def copied(self, copy: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A changed copy of a schema, which stands where the schema does."""
        if copy is not schema:
            self._copies.append(copy)  # or its identity might be another one's later on
            self._scopes[id(copy)] = self.scope(schema)
        return copy

    def target(self, schema: Mapping[str, Any], at: str) -> Any:
        """What the ``$ref`` of a schema leads to.

        Raises:
            ConstraintError: it leads out of the document, or nowhere.
        """
        pointer, found = schema["$ref"], self.scope(schema).root
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise ConstraintError(
                f"{short(at)}: $ref {short(pointer)} is not supported; only places in the same "
                "schema are, #/..."
            )
        if found is not self._outermost.root:
            name = found.get("$id", found.get("id"))
            if not name.removesuffix("#") or "#" in name.removesuffix("#"):
                raise ConstraintError(
                    f"{short(at)}: $ref inside a schema whose $id is {name!r:.80} is not "
                    "supported: an $id is not empty and has no fragment"
                )
        for step in pointer.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, Mapping) and step in found:
                found = found[step]
            else:
                raise ConstraintError(f"{short(at)}: $ref {short(pointer)} leads nowhere")
        return found


def _inside(schema: Mapping[str, Any], scope: Scope) -> Scope:
    """The scope of a schema that stands in another one's."""
    root, draft = scope.root, draft_named(schema.get("$schema")) or scope.draft
    name = schema.get("id" if draft is Draft.DRAFT_04 else "$id")
    # Up to draft-07 nothing counts beside $ref, and a fragment names a place, not a document.
    older = draft <= Draft.DRAFT_07
    if isinstance(name, str) and not (older and ("$ref" in schema or name.startswith("#"))):
        root = schema
    return Scope(root, draft)


def _held(part: Mapping[str, Any], names: bool) -> Iterator[tuple[Any, bool]]:
    """What may hold schemas, and whether it is a table of names."""
    for name, held in part.items():
        if names:
            yield held, False
        elif name not in DATA:
            yield held, name in NAMED
