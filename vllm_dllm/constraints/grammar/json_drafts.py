"""Drafts of JSON Schema: which one a schema is written in, and what it means in the latest one.

Schemas are read as draft 2020-12. Where an older draft differs in a keyword that is supported, the
schema is rewritten, or refused with a message that names the keyword.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from vllm_dllm.constraints.limits import ConstraintError


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


def draft_named(name: Any) -> Draft | None:
    """The draft that a ``$schema`` names, or None if it is unknown."""
    if not isinstance(name, str):
        return None
    place = name.removeprefix("http://").removeprefix("https://")
    return DRAFT_OF_URL.get(place.removesuffix("#"))


def as_latest(schema: Mapping[str, Any], draft: Draft) -> Mapping[str, Any]:
    """The schema as draft 2020-12 would write it; the same object if nothing differs.

    Raises:
        ConstraintError: a keyword does not have this form in that draft.
    """
    if draft < LATEST and "prefixItems" in schema and "items" in schema:
        raise ConstraintError(
            f"prefixItems beside items is of draft-2020-12, and $schema says {draft.title}, where "
            "items are all items"
        )
    if draft > Draft.DRAFT_04:
        return schema
    named = schema.get("type")
    kinds = named if isinstance(named, list) else [named]
    values = schema.get("enum")
    if "integer" in kinds and "number" not in kinds and isinstance(values, list):
        for value in values:
            if isinstance(value, float):
                raise ConstraintError(f"enum has {value}, which is no integer in draft-04")
    rewritten = dict(schema)
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if exclusive not in rewritten:
            continue
        excluded = rewritten.pop(exclusive)
        if not isinstance(excluded, bool):
            raise ConstraintError(f"{exclusive} is true or false in draft-04, beside {bound}")
        if excluded and bound not in rewritten:
            raise ConstraintError(f"{exclusive} says nothing in draft-04 without {bound}")
        if excluded:
            rewritten[exclusive] = rewritten.pop(bound)
    return schema if rewritten == schema else rewritten
