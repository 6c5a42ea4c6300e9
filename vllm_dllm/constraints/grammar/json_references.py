"""What a ``$ref`` leads to: a place in the document, or in the part of it that has an ``$id``.

A schema with its own ``$id`` inside another schema is a document of its own: in it, ``#/$defs/a``
means its own definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from vllm_dllm.constraints.grammar.json_drafts import LATEST, Draft, draft_named
from vllm_dllm.constraints.grammar.json_layout import short
from vllm_dllm.constraints.limits import ConstraintError

# Keywords whose value maps names to schemas.
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Keywords whose value is data rather than a schema.
DATA = {"const", "enum", "default", "examples"}


@dataclass(frozen=True)
class Scope:
    """The surroundings of a schema.

    Attributes:
        root: the document that a ``$ref`` in it refers to.
        draft: the draft that its keywords follow.
    """

    root: Any
    draft: Draft = LATEST


class References:
    """The references of one document. Parts of it are identified by their `id()`.

    Args:
        document: JSON, in which no object occurs in two places.
    """

    def __init__(self, document: Any) -> None:
        self._outermost = Scope(document)
        self._scopes: dict[int, Scope] = {}
        self._copies: list[Any] = []
        # (a part, its surroundings, whether it maps names to schemas)
        ahead: list[tuple[Any, Scope, bool]] = [(document, self._outermost, False)]
        while ahead:
            part, scope, names = ahead.pop()
            if isinstance(part, Mapping):
                scope = scope if names else _inside(part, scope)
                self._scopes[id(part)] = scope
                ahead += ((child, scope, table) for child, table in _children(part, names))
            elif isinstance(part, list):
                ahead += ((child, scope, False) for child in part)

    def scope(self, schema: Mapping[str, Any]) -> Scope:
        """The surroundings of a schema of the document."""
        return self._scopes.get(id(schema), self._outermost)

    def copied(self, copy: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Register `copy`, a changed copy of a schema, as having the same surroundings."""
        if copy is not schema:
            self._copies.append(copy)  # keep it alive, so that its id() is not reused
            self._scopes[id(copy)] = self.scope(schema)
        return copy

    def target(self, schema: Mapping[str, Any], path: str) -> Any:
        """What the ``$ref`` of a schema leads to.

        Raises:
            ConstraintError: it leads out of the document, or nowhere.
        """
        pointer, target = schema["$ref"], self.scope(schema).root
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise ConstraintError(
                f"{short(path)}: $ref {short(pointer)} is not supported; only places in the same "
                "schema are, #/..."
            )
        if target is not self._outermost.root:
            name = target.get("$id", target.get("id"))
            if not name.removesuffix("#") or "#" in name.removesuffix("#"):
                raise ConstraintError(
                    f"{short(path)}: $ref inside a schema whose $id is {name!r:.80} is not "
                    "supported: an $id is not empty and has no fragment"
                )
        for step in pointer.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, Mapping) and step in target:
                target = target[step]
            else:
                raise ConstraintError(f"{short(path)}: $ref {short(pointer)} leads nowhere")
        return target


def _inside(schema: Mapping[str, Any], scope: Scope) -> Scope:
    """The surroundings of a schema that is inside another one's."""
    root, draft = scope.root, draft_named(schema.get("$schema")) or scope.draft
    name = schema.get("id" if draft is Draft.DRAFT_04 else "$id")
    # Up to draft-07, keywords beside $ref are ignored, and an $id that is a fragment names a place
    # in the document rather than a new document.
    older = draft <= Draft.DRAFT_07
    if isinstance(name, str) and not (older and ("$ref" in schema or name.startswith("#"))):
        root = schema
    return Scope(root, draft)


def _children(part: Mapping[str, Any], names: bool) -> Iterator[tuple[Any, bool]]:
    """The parts that may contain schemas, and whether each maps names to schemas."""
    for name, child in part.items():
        if names:
            yield child, False
        elif name not in DATA:
            yield child, name in NAMED
