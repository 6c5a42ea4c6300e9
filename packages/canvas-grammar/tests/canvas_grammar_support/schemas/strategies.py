"""Random JSON schemas over all keywords of a draft, mostly such as have values."""

from __future__ import annotations

from typing import Any

from canvas_grammar.grammar.json.subschemas import GENERAL, OF_KIND, Draft, draft_named, has_keyword
from hypothesis import strategies as st

from canvas_grammar_support.schemas.corpora import DRAFTS

Schemas = st.SearchStrategy[Any]
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
NAMES = st.sampled_from(["a", "b", "ab", "kind", 'é"', "x-1"])
NUMBERS = st.integers(-12, 12) | st.sampled_from([0.5, -0.5, 2.5, 1.0, 1e3, 10**9, 0.1])
LETTERS = st.text(st.sampled_from('ab1"\\é \n'), max_size=4)
PATTERNS = st.sampled_from(
    ["^a+$", "a", "^[a-c]{2,3}$", "b$", r"^\d+$", "^x-", "^(a|bc)*$", "", r"\s", r"^[^a]\w*$"]
)
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname"]
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | LETTERS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


def keywords(draft: Draft, inner: Schemas) -> dict[str, Schemas]:
    """The values of every keyword but dynamic references."""
    named = st.dictionaries(NAMES, inner, max_size=3)
    several = st.lists(inner, min_size=1, max_size=3)
    names = st.lists(NAMES, min_size=1, max_size=2, unique=True)
    kinds = st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)
    # In draft-04 exclusive bounds are flags, which say nothing alone.
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    counts = ("minItems", "maxItems", "minContains", "maxContains", "minLength", "maxLength")
    schemas = ("contains", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "not")
    return {
        "type": st.sampled_from(TYPES) | kinds,
        "enum": st.lists(VALUES, min_size=1, max_size=3, unique_by=repr),
        "const": VALUES,
        "$ref": st.sampled_from([f"#/{folder(draft)}/a", f"#/{folder(draft)}/b", "#"]),
        **dict.fromkeys((*counts, "minProperties", "maxProperties"), st.integers(0, 4)),
        **dict.fromkeys((*schemas, "if", "then", "else"), inner),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(bounds[: 2 if draft == Draft.DRAFT_04 else 4], NUMBERS),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 10]),
        "pattern": PATTERNS,
        "format": st.sampled_from(FORMATS),
        "items": inner if draft == Draft.DRAFT_2020_12 else inner | several,
        "additionalItems": inner,
        "uniqueItems": st.booleans(),
        "properties": named,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "additionalProperties": inner | st.booleans(),
        "required": names,
        "dependencies": st.dictionaries(NAMES, names | inner, max_size=2),
        "dependentRequired": st.dictionaries(NAMES, names, max_size=2),
        "dependentSchemas": named,
    }


def folder(draft: Draft) -> str:
    """Where definitions are."""
    return "$defs" if draft >= Draft.DRAFT_2019_09 else "definitions"


@st.composite
def schemas(draw: st.DrawFn, draft: Draft = Draft.DRAFT_2020_12, depth: int = 3) -> Any:
    """Few keywords of one type, which is mostly named, and perhaps one for values of any type.

    A schema with many keywords has no value. ``$ref`` names the definitions `a` and `b`.
    """
    inner: Schemas = schemas(draft, depth - 1) if depth else st.just({})
    if draft > Draft.DRAFT_04:
        inner |= st.booleans()
    values = keywords(draft, inner)

    def some(names: tuple[str, ...], most: int) -> dict[str, Any]:
        known = [
            n for n in names if n in values and has_keyword(draft, n) and not values[n].is_empty
        ]
        chosen = draw(st.lists(st.sampled_from(known), max_size=most, unique=True)) if known else []
        return {name: draw(values[name]) for name in chosen}

    kind = draw(st.sampled_from(sorted(OF_KIND)))
    named = {"type": kind} if draw(st.integers(0, 2)) else {}
    return named | some(OF_KIND[kind], 3) | some(GENERAL, 1)


@st.composite
def whole_schemas(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A draft, a key of `DRAFTS`, and a schema that names it, with the definitions `a` and `b`."""
    name = draw(st.sampled_from(sorted(DRAFTS)))
    draft = draft_named(DRAFTS[name])
    assert draft is not None
    definitions = {each: draw(schemas(draft, 1)) for each in ("a", "b")}
    return name, {"$schema": DRAFTS[name], **draw(schemas(draft)), folder(draft): definitions}
