"""Drafts of JSON Schema: which one a schema is written in, and which keywords each of them has."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from referencing import Specification
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012


class Draft(IntEnum):
    """The drafts, in the order of their publication."""

    DRAFT_04 = 4
    DRAFT_06 = 6
    DRAFT_07 = 7
    DRAFT_2019_09 = 2019
    DRAFT_2020_12 = 2020

    @property
    def title(self) -> str:
        """The usual spelling of its name."""
        return self.name.lower().replace("_", "-")


LATEST = Draft.DRAFT_2020_12
DRAFT_OF_URL = {
    "json-schema.org/draft-04/schema": Draft.DRAFT_04,
    "json-schema.org/draft-06/schema": Draft.DRAFT_06,
    "json-schema.org/draft-07/schema": Draft.DRAFT_07,
    "json-schema.org/draft/2019-09/schema": Draft.DRAFT_2019_09,
    "json-schema.org/draft/2020-12/schema": LATEST,
    "json-schema.org/schema": LATEST,
    # OpenAPI's dialect only adds annotations.
    "spec.openapis.org/oas/3.1/dialect/base": LATEST,
}
SPECIFICATIONS: dict[Draft, Specification[Any]] = {
    Draft.DRAFT_04: DRAFT4,
    Draft.DRAFT_06: DRAFT6,
    Draft.DRAFT_07: DRAFT7,
    Draft.DRAFT_2019_09: DRAFT201909,
    Draft.DRAFT_2020_12: DRAFT202012,
}
# Keywords that not all drafts have: the first draft, and the last one.
OF_SOME_DRAFTS = {
    **dict.fromkeys(("const", "contains", "propertyNames"), (Draft.DRAFT_06, LATEST)),
    **dict.fromkeys(("if", "then", "else"), (Draft.DRAFT_07, LATEST)),
    "dependencies": (Draft.DRAFT_04, Draft.DRAFT_07),
    "additionalItems": (Draft.DRAFT_04, Draft.DRAFT_2019_09),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), (Draft.DRAFT_2019_09, LATEST)),
    **dict.fromkeys(("minContains", "maxContains"), (Draft.DRAFT_2019_09, LATEST)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (Draft.DRAFT_2019_09, LATEST)),
    "$recursiveRef": (Draft.DRAFT_2019_09, Draft.DRAFT_2019_09),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), (LATEST, LATEST)),
}


def draft_named(name: Any) -> Draft | None:
    """The draft that a ``$schema`` names, or None if it is unknown."""
    if not isinstance(name, str):
        return None
    place = name.removeprefix("http://").removeprefix("https://")
    return DRAFT_OF_URL.get(place.removesuffix("#"))


def has_keyword(draft: Draft, keyword: str) -> bool:
    """Whether a keyword that restricts values is one of a draft."""
    first, last = OF_SOME_DRAFTS.get(keyword, (Draft.DRAFT_04, LATEST))
    return first <= draft <= last
