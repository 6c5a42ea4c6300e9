"""What the fuzzing asks a server: where requests come to our models, and the fields of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_dllm.settings.parsing import OPTIONS
from vllm_dllm.settings.resolution import REQUEST_PREFIX
from vllm_dllm.settings.unknown_names import parameter_names

MODEL = {"model": "m"}
USER = [{"role": "user", "content": "copy ab"}]
COMPLETION = MODEL | {"prompt": "copy ab", "max_tokens": 8}
CHAT = MODEL | {"messages": USER, "max_tokens": 8}
# The least that each endpoint answers; one for `PREVIEW` takes the same.
LEAST: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT | {"messages": [USER, USER]},
    "/v1/responses": MODEL | {"input": "copy ab", "max_output_tokens": 8},
    "/v1/messages": CHAT,
    "/generative_scoring": MODEL
    | {"query": "copy ab", "items": ["a", "b"], "label_token_ids": [97, 98]},
    "/v1/systemone": MODEL
    | {"state": "x", "questions": {"q": {"type": "choice", "criteria": {"a": "b", "c": None}}}},
    "/inference/v1/generate": MODEL
    | {"token_ids": [99, 111, 112], "sampling_params": {"max_tokens": 8}},
}
PREVIEW = "/render"  # it shows what would come to the engine


@dataclass(frozen=True, eq=False)
class Field:
    """A field of an endpoint's body.

    Attributes:
        path: its names from the outside in.
        kinds: the types that it takes, in the words of JSON; ``array of`` for a list's items.
        choices: its values, where they are listed.
    """

    path: tuple[str, ...]
    kinds: tuple[str, ...]
    choices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, eq=False)
class Endpoint:
    """An endpoint as the server describes it; `least` is a body that it answers."""

    path: str
    least: Mapping[str, Any]
    fields: tuple[Field, ...]

    @property
    def generates(self) -> bool:
        return not self.path.endswith(PREVIEW)


def endpoints(document: Mapping[str, Any], corruption: str) -> list[Endpoint]:
    """Those of `LEAST` that a server opens by its ``/openapi.json``.

    `corruption` (``mask`` or ``uniform``) says which ``diffusion_*`` options there are.
    """
    found = []
    for path, methods in document["paths"].items():
        if least := LEAST.get(path.removesuffix(PREVIEW)):
            content = methods["post"]["requestBody"]["content"]["application/json"]
            fields = _fields(path, content["schema"], document["components"]["schemas"], corruption)
            found.append(Endpoint(path, least, tuple(fields)))
    return found


Schemas = Mapping[str, Mapping[str, Any]]


def _fields(
    path: str, schema: Mapping[str, Any], schemas: Schemas, corruption: str
) -> Iterator[Field]:
    """Every field of a body, with our options and vLLM's own parameters where they go."""
    for names, field in _properties((), schema, schemas, depth=2).items():
        yield field
        if names == ("vllm_xargs",):
            yield from _options(names, corruption)
    if path == "/inference/v1/generate":
        yield from _parameters()
        yield from _options(("sampling_params", "extra_args"), corruption)


def _properties(
    above: tuple[str, ...], schema: Mapping[str, Any], schemas: Schemas, depth: int
) -> dict[tuple[str, ...], Field]:
    """The fields of a schema by their paths, and of the objects in them down to a depth."""
    found: dict[tuple[str, ...], Field] = {}
    for part in _parts(schema, schemas):
        for name, one in part.get("properties", {}).items():
            names = (*above, name)
            choices = [value for each in _parts(one, schemas) for value in each.get("enum", ())]
            kinds = tuple(dict.fromkeys(_kinds(one, schemas)))
            found[names] = Field(names, kinds, tuple(choices))
            if depth > 1:
                found |= _properties(names, one, schemas, depth - 1)
    return found


def _parts(schema: Mapping[str, Any], schemas: Schemas) -> Iterator[Mapping[str, Any]]:
    """A schema and those that it is a union of, without references."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    yield schema
    for union in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(union, ()):
            yield from _parts(one, schemas)


def _kinds(schema: Mapping[str, Any], schemas: Schemas) -> Iterator[str]:
    for part in _parts(schema, schemas):
        kind = part.get("type")
        if kind == "array":
            items = list(_kinds(part.get("items", {}), schemas))
            yield from (f"array of {item}" for item in items or [""])
        elif isinstance(kind, str):
            yield kind


NUMBER = ("integer", "number")
NUMBERS = ("array of integer",)
STRINGS = ("array of string",)
OBJECT = ("object",)


def _options(above: tuple[str, ...], corruption: str) -> Iterator[Field]:
    for name in (*OPTIONS, *sorted(parameter_names(corruption)), "unheard_of"):  # type: ignore[arg-type]
        names = (*above, REQUEST_PREFIX + name)
        if name == "algorithm":
            yield Field(names, ("string",), ("EntropyBound", "LowConfidence", "os:getcwd"))
        else:
            yield Field(names, NUMBERS if name in ("seed_canvas", "pinned") else NUMBER)
    yield Field((*above, "kv_transfer_params"), OBJECT)


_KINDS = {
    **dict.fromkeys(("stop", "bad_words"), STRINGS),
    **dict.fromkeys(("logit_bias", "extra_args", "structured_outputs"), OBJECT),
    "repetition_detection": OBJECT,
}


def _parameters() -> Iterator[Field]:
    """`SamplingParams`, which ``/inference/v1/generate`` takes as they are, private ones too."""
    for name in SamplingParams.__struct_fields__:
        kinds = NUMBERS if name.endswith("_ids") or name == "_bad_words_token_ids" else NUMBER
        yield Field(("sampling_params", name), _KINDS.get(name, kinds))
    for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag"):
        yield Field(("sampling_params", "structured_outputs", name), ("string",))
