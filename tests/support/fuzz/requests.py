"""Requests that might be meant: several options at once, most of them of their kind and range."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.fuzz.endpoints import GENERATING, Endpoint, Field
from tests.support.fuzz.values import kinds_of, values_for
from tests.support.soak.requests import MASKED
from tests.support.strategies import JSON, NUMBERS, TEXTS

CANVAS, VOCABULARY = 32, 272  # of the tiny checkpoints, but for SDAR's canvas
SDAR_CANVAS = 4

IDS = st.integers(0, VOCABULARY - 1)
MANY = st.lists(IDS | NUMBERS, max_size=3) | st.lists(IDS, max_size=VOCABULARY)
FORMATS = st.sampled_from([{"type": "text"}, {"type": "json_object"}])
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "pattern": "^[ab]+$"},
    {"enum": ["a", 1, None]},
    {"type": "x"},
)
CONSTRAINTS: tuple[Any, ...] = (
    *({"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}, {"grammar": 'root ::= "a"'}),
    *({"regex": "("}, {"choice": []}, {}, {"json": "{"}, {"regex": "a", "choice": ["a"]}),
    *({"json": schema} for schema in SCHEMAS),
)
TOOL = {"name": "f", "description": "x", "parameters": SCHEMAS[0]}
TOOL_CHOICES = st.sampled_from(
    ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]
)
# Values of their kind, for names that mean the same on every endpoint.
ORDINARY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["m", "a", "nobody"]),  # "a": SDAR's adapter
    "priority": st.integers(-3, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300) | st.just(2**31),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(0, 3),
    "max_tokens": st.integers(0, 80),
    "max_completion_tokens": st.integers(0, 80),
    "max_output_tokens": st.integers(-1, 80),
    "min_tokens": st.integers(0, 40),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(1e-6, 3) | st.sampled_from([0.0, 1e-46, 1e-30, 1e30]),
    "top_logprobs": st.integers(-2, 25),
    "logprob_token_ids": MANY,
    "logit_bias": st.dictionaries(IDS.map(str) | TEXTS, NUMBERS, max_size=40),
    "allowed_token_ids": MANY,
    "bad_words": st.lists(TEXTS, max_size=3),
    "stop": TEXTS | st.lists(TEXTS, max_size=6),
    "stop_sequences": st.lists(TEXTS, max_size=6),
    "stop_token_ids": MANY,
    "prompt_logprobs": st.integers(-1, 3),
    "response_format": FORMATS | st.just({"type": "x"}),
    "text": FORMATS.map(lambda kind: {"format": kind}),
    "structured_outputs": st.sampled_from(CONSTRAINTS),
    "thinking_token_budget": st.integers(-1, 3),
    "truncate_prompt_tokens": st.integers(-1, 40),
    "include": st.just(["message.output_text.logprobs"]),
    "diffusion_algorithm": st.sampled_from(sorted(MASKED)),
    "diffusion_max_steps": st.integers(1, 40) | st.sampled_from([65535, 65536, 65537]),
    "diffusion_max_post_edit_steps": st.integers(0, 40),
    "diffusion_steps": st.integers(1, 40),
    "diffusion_canvas_length": st.integers(0, CANVAS + 1),
    "diffusion_seed_canvas": st.lists(IDS, min_size=CANVAS, max_size=CANVAS)
    | st.lists(IDS, min_size=SDAR_CANVAS, max_size=SDAR_CANVAS)
    | MANY,
    "diffusion_pinned": st.lists(st.integers(0, CANVAS), max_size=4) | MANY,
    "diffusion_read_only": st.integers(0, 2),
    "diffusion_constrained": st.integers(0, 2),
    "diffusion_stream_prefix": st.integers(0, 2),
    "output_kind": st.integers(0, 3),
}
ENDPOINTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/v1/chat/completions": {
        "logprobs": st.booleans(),
        "tools": st.just([{"type": "function", "function": TOOL}]),
        "tool_choice": TOOL_CHOICES,
    },
    "/v1/messages": {"tools": st.just([{"name": "f", "input_schema": SCHEMAS[0]}])},
    "/v1/responses": {
        "tools": st.just([{"type": "function", **TOOL}]),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
    },
}
TEXT = st.just("copy ab") | st.just("copy ab " * 70) | TEXTS.filter(bool)
PROMPTS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.lists(IDS, min_size=1, max_size=70) | st.just([5] * 480) | TEXT,
    "messages": TEXT.map(lambda text: [{"role": "user", "content": text}]),
    "input": TEXT,
    "token_ids": st.lists(IDS, min_size=1, max_size=70) | st.just([5] * 480),
    "tokens": st.lists(IDS, max_size=70),
}
# Numbers of tokens or steps between what is short and what no number type holds: answers that take
# minutes, rightly.
WILD = JSON.filter(lambda v: not isinstance(v, int) or abs(v) < 100 or abs(v) > 10**9)
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def ordinary(field: Field, endpoint: Endpoint) -> st.SearchStrategy[Any]:
    """Values of a field that somebody might mean, or the extremes of its type."""
    name = field.path[-1]
    for table in (ENDPOINTS.get(endpoint.path, {}), ORDINARY):
        if name in table:
            return table[name]
    kinds = kinds_of(field.schema)
    if "boolean" in kinds:
        return st.booleans()
    if name.startswith("diffusion_") and "number" in kinds:
        return st.floats(0, 1) | st.integers(0, 8)
    if "integer" in kinds and len(kinds) <= 2:
        return st.integers(-1, 40)
    if "null" in kinds:
        return st.none() | st.none() | st.sampled_from(values_for(field.schema))
    return st.sampled_from(values_for(field.schema))


@st.composite
def bodies(draw: Any, endpoint: Endpoint, most: int = 4) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A body with a few of an endpoint's options, and the names that were given."""
    body: dict[str, Any] = dict(endpoint.least or {})
    for name in [name for name in PROMPTS if name in body]:
        if draw(st.integers(0, 3)) == 0:
            body[name] = draw(PROMPTS[name])
            if endpoint.path.endswith("/batch") and name == "messages":
                body[name] = [body[name], draw(PROMPTS[name])]
    given = draw(
        st.lists(st.sampled_from(endpoint.fields), max_size=most, unique_by=lambda f: f.path)
    )
    wild = draw(st.integers(0, 3)) == 0
    for field in given:
        value = draw(WILD if wild and field.path[-1] not in SHORT else ordinary(field, endpoint))
        body = placed(body, field.path, value)
    return body, tuple(str(field) for field in given)


def placed(body: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with one field more; what stands in its way gives way."""
    name, *rest = path
    if rest:
        inner = body.get(name)
        value = placed(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    return {**body, name: value}


def weight(endpoint: Endpoint) -> int:
    """How much more of the random bodies an endpoint gets than the least one."""
    if endpoint.path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        return 12
    if endpoint.path in GENERATING:
        return 6
    return 2 if endpoint.fields else 1
