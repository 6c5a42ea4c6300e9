"""Whether a value may fit two of the schemas of a `oneOf`; in doubt, the answer is yes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from vllm_dllm.constraints.grammar.json_drafts import Draft
from vllm_dllm.constraints.grammar.json_references import References
from vllm_dllm.constraints.grammar.json_scalars import TYPES, has_type

MOST_STEPS = 32


def first_overlap(
    options: Sequence[Any], references: References, path: str
) -> tuple[int, int] | None:
    """The indices of the first two options that may share a value, or None if no two do.

    Two options share no value if their types differ, if their constants differ, or if both require
    a property whose constants differ (the usual discriminator).

    Args:
        options: schemas.
        references: of the document that contains them.
        path: their place in the document, for messages.

    Raises:
        ConstraintError: a ``$ref`` leads nowhere.
    """
    facts = _SchemaFacts(references, path)
    followed = [facts.followed(option) for option in options]
    for (i, first), (j, second) in combinations(enumerate(followed), 2):
        if not facts.apart(first, second):
            return i, j
    return None


class _SchemaFacts:
    """Facts about the schemas of a document."""

    def __init__(self, references: References, path: str) -> None:
        self.references, self.path = references, path

    def followed(self, schema: Any) -> Any:
        """The schema that references and an `allOf` of a single schema lead to."""
        for _ in range(MOST_STEPS):
            if not isinstance(schema, Mapping):
                return schema
            if "$ref" in schema:
                schema = self.references.target(schema, self.path)
            elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
                (schema,) = schema["allOf"]
            else:
                return schema
        return {}

    def apart(self, first: Any, second: Any) -> bool:
        """Whether it is certain that no value fits both."""
        if first is False or second is False:
            return True
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return False
        first_values, second_values = self.constants(first), self.constants(second)
        if first_values is not None and second_values is not None:
            return not {_same(v) for v in first_values} & {_same(v) for v in second_values}
        if first_values is not None or second_values is not None:
            schema = first if first_values is None else second
            enumerated = second_values if first_values is None else first_values
            return not any(has_type(v, name) for v in enumerated or [] for name in _types(schema))
        if not _types(first) & _types(second):
            return True
        if _types(first) & _types(second) != {"object"}:
            return False
        shared = set(first.get("required", [])) & set(second.get("required", []))
        return any(
            self.constants_apart(first.get("properties"), second.get("properties"), name)
            for name in shared
        )

    def constants_apart(self, first: Any, second: Any, name: str) -> bool:
        """Whether a property has constants in both schemas, and none in common."""
        constants = []
        for properties in (first, second):
            schema = properties.get(name) if isinstance(properties, Mapping) else None
            schema = self.followed(schema)
            values = self.constants(schema) if isinstance(schema, Mapping) else None
            if values is None:
                return False
            constants.append({_same(value) for value in values})
        return not constants[0] & constants[1]

    def constants(self, schema: Mapping[str, Any]) -> list[Any] | None:
        """All values that may fit, or None if they are not enumerated."""
        # Draft-04 has no const: there it excludes no value.
        if "const" in schema and self.references.scope(schema).draft > Draft.DRAFT_04:
            return [schema["const"]]
        values = schema.get("enum")
        return values if isinstance(values, list) else None


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that values of a schema may have; all of them if it names none."""
    named = schema.get("type", list(TYPES))
    names = {named} if isinstance(named, str) else set(named)
    return names | {"integer"} if "number" in names else names


def _same(value: Any) -> str:
    """The same text for values that JSON Schema considers equal, such as 1 and 1.0, not true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(_same(part) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{_same(value[k])}' for k in sorted(value))}}}"
    return json.dumps(value)
