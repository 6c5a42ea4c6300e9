"""What a server can be asked: its endpoints, by its own description, and the fields of each.

Nothing is left out by forgetting it: an endpoint that takes requests and is named neither in
`LEAST` nor in `PASSED_OVER` stops the fuzzing.
"""

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
RESPONSE = MODEL | {"input": "copy ab", "max_output_tokens": 8}
CHOICE = {"index": 0, "token_ids": [97, 98], "finish_reason": "stop"}
# The least that each endpoint answers; None where it takes no body.
LEAST: Mapping[str, Mapping[str, Any] | None] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT | {"messages": [USER, USER]},
    "/v1/responses": RESPONSE,
    "/v1/responses/{response_id}/cancel": None,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": MODEL | {"messages": USER},
    "/generative_scoring": MODEL
    | {"query": "copy ab", "items": ["a", "b"], "label_token_ids": [97, 98]},
    "/v1/systemone": MODEL
    | {"state": "x", "questions": {"q": {"type": "choice", "criteria": {"a": "b", "c": None}}}},
    "/v1/decisions": MODEL  # since vLLM 0.33
    | {"input": "x", "questions": [{"type": "predicate", "instructions": "a?"}]},
    "/inference/v1/generate": MODEL
    | {"token_ids": [99, 111, 112], "sampling_params": {"max_tokens": 8}},
    "/inference/v1/abort_requests": {"request_ids": ["nobody"]},
    "/invocations": COMPLETION,
    "/ping": None,
    "/tokenize": MODEL | {"prompt": "copy ab"},
    "/detokenize": MODEL | {"tokens": [97, 98]},
    "/v1/completions/render": COMPLETION,
    "/v1/chat/completions/render": CHAT,
    "/v1/responses/render": RESPONSE,
    "/v1/messages/render": CHAT,
    "/v1/completions/derender": MODEL
    | {"generate_responses": [{"request_id": "x", "choices": [CHOICE]}]},
    "/v1/chat/completions/derender": MODEL
    | {"generate_response": {"request_id": "x", "choices": [CHOICE]}, "chat_request": CHAT},
    "/reset_prefix_cache": None,
    "/reset_mm_cache": None,
    "/reset_encoder_cache": None,
    "/is_scaling_elastic_ep": None,
    "/update_weight_version": {"new_version": "x"},
}
# Where requests come to the engine; the others answer from the API server alone.
GENERATING = (
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses"),
    *("/v1/messages", "/inference/v1/generate", "/invocations", "/generative_scoring"),
    "/v1/systemone",
)
# What changes the server for everybody, as its operator asks it to.
PASSED_OVER = (
    *("/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume", "/abort_requests"),
    *("/collective_rpc", "/scale_elastic_ep", "/weight_checker", "/init_weight_transfer_engine"),
    *("/shutdown_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update"),
    *("/update_weights", "/finish_weight_update"),
)
# Values of parts of a path and of a query.
ODD_WORDS = ("x", "0", "-1", "9223372036854775808", "1e400", "nan", "true", "%00", "%F0%9F%99%82")


@dataclass(frozen=True, eq=False)
class Field:
    """A field of an endpoint's body: its names from the outside in, and its schema."""

    path: tuple[str, ...]
    schema: Mapping[str, Any]

    def __str__(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, eq=False)
class Endpoint:
    """An endpoint as the server describes it; its path may have parts in braces.

    `least` is a body that it answers, None where it takes none; `queries` are names for a query.
    """

    method: str
    path: str
    least: Mapping[str, Any] | None
    fields: tuple[Field, ...]
    queries: tuple[str, ...]

    def __str__(self) -> str:
        return self.path if self.method == "POST" else f"{self.method} {self.path}"


def endpoints(document: Mapping[str, Any], corruption: str) -> list[Endpoint]:
    """All that a server opens by its ``/openapi.json``, but for those that are passed over.

    `corruption` (``mask`` or ``uniform``) says which ``diffusion_*`` options there are.
    """
    schemas = document.get("components", {}).get("schemas", {})
    found = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            if path in PASSED_OVER and method != "get":
                continue
            if method != "get" and path not in LEAST:
                raise ValueError(
                    f"{method.upper()} {path}: the server opens it, and it is neither in LEAST nor "
                    "in PASSED_OVER of tests/support/fuzz/endpoints.py"
                )
            least = LEAST[path] if method != "get" else None
            fields = tuple(_fields(path, described, schemas, corruption)) if least else ()
            queries = [
                one["name"] for one in described.get("parameters", ()) if one["in"] == "query"
            ]
            found.append(Endpoint(method.upper(), path, least, fields, tuple(queries)))
    return found


def _fields(
    path: str, described: Mapping[str, Any], schemas: Mapping[str, Any], corruption: str
) -> Iterator[Field]:
    """Every field of a body, with our options and vLLM's own parameters where they go."""
    if path == "/invocations":  # it does not say that it takes what completions take
        schema: Mapping[str, Any] = {"$ref": "#/components/schemas/CompletionRequest"}
    else:
        content = described.get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
    for names, one in _properties((), schema, schemas, depth=2).items():
        yield Field(names, one)
        if names == ("vllm_xargs",):
            yield from _options(names, corruption)
    if path == "/inference/v1/abort_requests":
        yield Field(("request_ids",), {"type": "array", "items": {"type": "string"}})
    if path == "/inference/v1/generate":
        yield from _parameters()
        yield from _options(("sampling_params", "extra_args"), corruption)


def _properties(
    names: tuple[str, ...], schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int
) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """The fields of a schema by their paths, and of the objects in them down to a depth."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for union in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(union, ()):
            found |= _properties(names, one, schemas, depth)
    for name, one in schema.get("properties", {}).items():
        found[(*names, name)] = _resolved(one, schemas)
        if depth > 1:
            found |= _properties((*names, name), one, schemas, depth - 1)
    return found


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """A field's schema, where an object of its own is an object and no more."""
    if "$ref" in schema:
        kind = schemas[schema["$ref"].rpartition("/")[2]]
        return {key: kind[key] for key in ("type", "enum") if key in kind} or {"type": "object"}
    found = dict(schema)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            found[union] = [_resolved(one, schemas) for one in schema[union]]
    if "items" in schema:
        found["items"] = _resolved(schema["items"], schemas)
    return found


NUMBER: Mapping[str, Any] = {"anyOf": [{"type": "integer"}, {"type": "number"}]}
NUMBERS: Mapping[str, Any] = {"type": "array", "items": {"type": "integer"}}
STRINGS: Mapping[str, Any] = {"type": "array", "items": {"type": "string"}}
OBJECT: Mapping[str, Any] = {"type": "object"}


def _options(above: tuple[str, ...], corruption: str) -> Iterator[Field]:
    for name in (*OPTIONS, *sorted(parameter_names(corruption)), "unheard_of"):  # type: ignore[arg-type]
        kind: Mapping[str, Any] = NUMBER
        if name in ("seed_canvas", "pinned"):
            kind = NUMBERS
        elif name == "algorithm":
            kind = {"type": "string", "enum": ["EntropyBound", "LowConfidence", "os:getcwd"]}
        yield Field((*above, REQUEST_PREFIX + name), kind)
    yield Field((*above, "kv_transfer_params"), OBJECT)


_KINDS: Mapping[str, Mapping[str, Any]] = {
    "stop": STRINGS,
    "bad_words": STRINGS,
    "logit_bias": OBJECT,
    "extra_args": OBJECT,
    "structured_outputs": OBJECT,
    "repetition_detection": OBJECT,
}


def _parameters() -> Iterator[Field]:
    """`SamplingParams`, which ``/inference/v1/generate`` takes as they are, private ones too."""
    for name in SamplingParams.__struct_fields__:
        kind = NUMBERS if name.endswith("_ids") or name == "_bad_words_token_ids" else NUMBER
        yield Field(("sampling_params", name), _KINDS.get(name, kind))
    for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag"):
        above = ("sampling_params", "structured_outputs", name)
        yield Field(above, {"type": "string"})
