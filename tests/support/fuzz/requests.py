"""Requests that might be meant: several options at once, most of them of their kind and range."""

from __future__ import annotations

import random
from typing import Any

from tests.support.fuzz.endpoints import GENERATING, Endpoint, Field
from tests.support.fuzz.values import ANYTHING, kinds_of, values_for
from tests.support.soak.requests import MASKED

CANVAS, VOCABULARY = 32, 272  # of the tiny checkpoints, but for SDAR's canvas of 4
MOST_OPTIONS = 4
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "f", "description": "x", "parameters": SCHEMA}
IDS = ([97], [97, 98, 257], list(range(VOCABULARY)), [])
# Values of their kind, for names that mean the same on every endpoint; a pair of numbers is a
# range, ends included.
ORDINARY: dict[str, Any] = {
    "model": ["m", "a", "nobody"],  # "a": SDAR's adapter
    "priority": (-3, 3),
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 300),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**63 - 1),
    "n": (0, 3),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (0, 80)),
    "min_tokens": (0, 40),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2.0, 2.0)),
    "repetition_penalty": (1e-6, 3.0),
    "top_logprobs": (-2, 25),
    "logit_bias": [{"97": 5.0}, {"98": -100, "99": 1e38}, {"x": 1}],
    **dict.fromkeys(("logprob_token_ids", "allowed_token_ids", "stop_token_ids"), IDS),
    "bad_words": [["a"], ["copy", "é"], []],
    **dict.fromkeys(("stop", "stop_sequences"), (["a"], ["zz", "7", " "], [])),
    "prompt_logprobs": (-1, 3),
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "x"}],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}],
    "structured_outputs": [
        *({"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}, {"json": SCHEMA}),
        *({"regex": "("}, {"choice": []}, {"json": "{"}, {"regex": "a", "choice": ["a"]}),
        {"grammar": 'root ::= "a"'},
    ],
    "thinking_token_budget": (-1, 3),
    "truncate_prompt_tokens": (-1, 40),
    "include": [["message.output_text.logprobs"]],
    "diffusion_algorithm": sorted(MASKED),
    "diffusion_max_steps": (1, 40),
    "diffusion_max_post_edit_steps": (0, 40),
    "diffusion_steps": (1, 40),
    "diffusion_canvas_length": (0, CANVAS + 1),
    "diffusion_seed_canvas": [[97] * CANVAS, [97] * 4, [5]],
    "diffusion_pinned": [[0], [0, CANVAS], []],
    **dict.fromkeys(
        ("diffusion_read_only", "diffusion_constrained", "diffusion_stream_prefix"), (0, 2)
    ),
    "output_kind": (0, 3),
    "tool_choice": ["auto", "none", "required"],
}
TOOLS: dict[str, Any] = {
    "/v1/chat/completions": {"type": "function", "function": TOOL},
    "/v1/messages": {"name": "f", "input_schema": SCHEMA},
    "/v1/responses": {"type": "function", **TOOL},
}
TEXTS = ("copy ab", "copy ab " * 70, "é🙂", " ")
PROMPTS: dict[str, list[Any]] = {
    "prompt": [[97, 98], [5] * 480, *TEXTS],
    "messages": [[{"role": "user", "content": text}] for text in TEXTS],
    "input": [*TEXTS],
    "token_ids": [[97, 98], [5] * 480],
}
# Whose wild values are answers that take minutes, rightly.
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def ordinary(field: Field, endpoint: Endpoint, draw: random.Random) -> Any:
    """A value of a field that somebody might mean, or an extreme of its type."""
    name, kinds = field.path[-1], kinds_of(field.schema)
    if name == "tools" and endpoint.path in TOOLS:
        return [TOOLS[endpoint.path]]
    values = ORDINARY.get(name)
    if values is None and "boolean" in kinds:
        values = [True, False]
    elif values is None and name.startswith("diffusion_") and "number" in kinds:
        values = (0.0, 1.0)
    elif values is None and "integer" in kinds and len(kinds) <= 2:
        values = (-1, 40)
    if values is None:
        return draw.choice([None, *values_for(field.schema)])
    if isinstance(values, tuple) and isinstance(values[0], float):
        return draw.uniform(*values)
    if isinstance(values, tuple) and isinstance(values[0], int):
        return draw.randint(*values)
    return draw.choice(values)


def body_of(endpoint: Endpoint, draw: random.Random) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A body with a few of an endpoint's options, and the names that were given."""
    body: dict[str, Any] = dict(endpoint.least or {})
    for name in [name for name in PROMPTS if name in body]:
        if draw.random() < 0.25:
            body[name] = draw.choice(PROMPTS[name])
            if endpoint.path.endswith("/batch"):
                body[name] = [body[name], draw.choice(PROMPTS[name])]
    most = min(MOST_OPTIONS, len(endpoint.fields))
    given = draw.sample(endpoint.fields, draw.randint(0, most))
    wild = draw.random() < 0.25
    for field in given:
        free = wild and field.path[-1] not in SHORT
        value = draw.choice(ANYTHING) if free else ordinary(field, endpoint, draw)
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
