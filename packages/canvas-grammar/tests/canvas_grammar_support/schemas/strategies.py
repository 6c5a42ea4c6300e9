"""Random JSON schemas over all keywords of a draft, mostly such as have values.

A schema takes the keywords of one type, and often others beside them: `allOf`, `anyOf`, `oneOf`,
`not`, `if`, `$ref`. Definitions may refer to each other and to themselves.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from canvas_grammar_support.schemas.corpora import DRAFTS

Schemas = st.SearchStrategy[Any]
ORDER = tuple(DRAFTS)
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
NAMES = st.sampled_from(["a", "b", "ab", "kind", 'é"', "x-1"])
NUMBERS = st.integers(-12, 12) | st.sampled_from([0.5, -0.5, 2.5, 1.0, 1e3, 10**9, 0.1])
COUNTS = st.integers(0, 3)
LETTERS = st.text(st.sampled_from('ab1"\\é \n'), max_size=4)
PATTERNS = st.sampled_from(
    [
        "^a+$",
        "a",
        "^[a-c]{2,3}$",
        "b$",
        r"^\d+$",
        "^x-",
        "^(a|bc)*$",
        "",
        r"\s",
        "^.$",
        r"^[^a]\w*$",
    ]
)
FORMATS = st.sampled_from(
    ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | LETTERS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
REQUIRED = st.lists(NAMES, max_size=2, unique=True)
REQUIRED_IN_DRAFT_4 = st.lists(NAMES, min_size=1, max_size=2, unique=True)


def some(parts: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Few of the keywords, because a schema with all of them has no value."""
    names = st.lists(st.sampled_from(sorted(parts)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({n: parts[n] for n in chosen}))


def has(draft: str, first: str) -> bool:
    """Whether a draft is not older than another one."""
    return ORDER.index(draft) >= ORDER.index(first)


def of_numbers(draft: str) -> st.SearchStrategy[dict[str, Any]]:
    exclusive = NUMBERS if has(draft, "draft6") else st.booleans()
    parts = {"minimum": NUMBERS, "maximum": NUMBERS}
    parts |= {"exclusiveMinimum": exclusive, "exclusiveMaximum": exclusive}
    parts |= {"multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.01, 10])}

    def complete(schema: dict[str, Any]) -> dict[str, Any]:
        if not has(draft, "draft6"):  # a flag says nothing without its bound
            schema |= {
                bound: schema.get(bound, 3)
                for bound in ("minimum", "maximum")
                if f"exclusive{bound.capitalize()}" in schema
            }
        return schema

    return some(parts).map(complete)


def of_strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = {"minLength": COUNTS, "maxLength": st.integers(0, 8)}
    return some(lengths | {"pattern": PATTERNS, "format": FORMATS})


def of_arrays(draft: str, inner: Schemas) -> st.SearchStrategy[dict[str, Any]]:
    few = st.lists(inner, min_size=1, max_size=2)
    parts = {"minItems": COUNTS, "maxItems": COUNTS, "uniqueItems": st.booleans()}
    if has(draft, "draft2020-12"):
        parts |= {"items": inner, "prefixItems": few}
    else:
        parts |= {"items": inner | few, "additionalItems": inner}
    if has(draft, "draft6"):
        parts |= {"contains": inner}
    if has(draft, "draft2019-09"):
        parts |= {"minContains": COUNTS, "maxContains": COUNTS, "unevaluatedItems": inner}
    return some(parts)


def of_objects(draft: str, inner: Schemas) -> st.SearchStrategy[dict[str, Any]]:
    named = st.dictionaries(NAMES, inner, max_size=3)
    required = REQUIRED if has(draft, "draft6") else REQUIRED_IN_DRAFT_4
    parts: dict[str, st.SearchStrategy[Any]] = {
        "properties": named,
        "required": required,
        "additionalProperties": inner | st.booleans(),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
    }
    if has(draft, "draft6"):
        parts["propertyNames"] = inner | of_strings()
    if has(draft, "draft2019-09"):
        parts["dependentRequired"] = st.dictionaries(NAMES, REQUIRED, max_size=2)
        parts["dependentSchemas"] = named
        parts["unevaluatedProperties"] = inner
    else:
        parts["dependencies"] = st.dictionaries(NAMES, required | inner, max_size=2)
    closed = st.fixed_dictionaries(
        {"properties": named}, optional={"additionalProperties": st.just(False)}
    )
    return closed | some(parts) | st.builds(lambda a, b: a | b, closed, some(parts))


def beside(draft: str, inner: Schemas) -> st.SearchStrategy[dict[str, Any]]:
    """Keywords that apply further schemas to the same value."""
    several = st.lists(inner, min_size=1, max_size=3)
    parts: dict[str, st.SearchStrategy[Any]] = {
        "allOf": several, "anyOf": several, "oneOf": several, "not": inner,
    }  # fmt: skip
    if has(draft, "draft7"):
        parts |= {"if": inner, "then": inner, "else": inner}
    folder = "$defs" if has(draft, "draft2019-09") else "definitions"
    parts["$ref"] = st.sampled_from([f"#/{folder}/a", f"#/{folder}/b", "#"])
    return some(parts)


def plain(draft: str) -> st.SearchStrategy[dict[str, Any]]:
    """Without further schemas."""
    values = st.lists(VALUES, min_size=1, max_size=3, unique_by=repr)
    kinds = st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)
    found = (
        st.builds(lambda t, more: {"type": t} | more, st.just("string"), of_strings())
        | st.builds(
            lambda t, more: {"type": t} | more,
            st.sampled_from(["integer", "number"]),
            of_numbers(draft),
        )
        | st.fixed_dictionaries({"type": st.sampled_from(TYPES[:5]) | kinds})
        | st.fixed_dictionaries({"enum": values})
        | of_strings()
        | of_numbers(draft)
    )
    return found | st.fixed_dictionaries({"const": VALUES}) if has(draft, "draft6") else found


def inner_schemas(draft: str) -> Schemas:
    """Schemas that may stand anywhere in a schema of a draft."""
    leaf: Schemas = plain(draft)
    if has(draft, "draft6"):
        leaf = leaf | st.booleans()

    return st.recursive(leaf, lambda inner: larger(draft, inner), max_leaves=6)


def larger(draft: str, inner: Schemas) -> st.SearchStrategy[dict[str, Any]]:
    """Of schemas, half of them with others beside the keywords of a type."""
    arrays, objects = of_arrays(draft, inner), of_objects(draft, inner)
    alone = (
        st.builds(lambda more: {"type": "array"} | more, arrays)
        | st.builds(lambda more: {"type": "object"} | more, objects)
        | arrays
        | objects
        | plain(draft)
    )
    mixed = st.builds(lambda a, b: a | b, alone, beside(draft, inner))
    # `alone | mixed` would be one union of all parts, with `mixed` as one of a dozen.
    return st.booleans().flatmap(lambda together: mixed if together else alone)


@st.composite
def whole_schemas(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A draft, a key of `DRAFTS`, and a schema that names it, with the definitions `a` and `b`."""
    draft = draw(st.sampled_from(ORDER))
    inner = inner_schemas(draft)
    root = draw(larger(draft, inner))
    folder = "$defs" if has(draft, "draft2019-09") else "definitions"
    definitions = {name: draw(inner) for name in ("a", "b")}
    return draft, {"$schema": DRAFTS[draft]} | root | {folder: definitions}
