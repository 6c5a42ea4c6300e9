"""The bodies that are sent: one field's extremes, contradictions, random ones, and broken bytes.

All of them come from one seed. A run that is too short for everything takes the same share of each
endpoint's fields, so that no field is forgotten before its neighbours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tests.support.fuzz.endpoints import GENERATING, ODD_WORDS, Endpoint, Field
from tests.support.fuzz.requests import body_of, placed, weight
from tests.support.fuzz.values import FLOATS, INTEGERS, kinds_of, values_for

EOS = 257
ALL = list(range(272))
# Parts of a run; the rest are extremes of single fields. There are fewer random bodies, but not
# fewer than the least, where that leaves room for every number.
RANDOM, LEAST_RANDOM, BROKEN, WITHOUT_BODY = 0.35, 0.15, 0.03, 0.03
JSON_TYPE = "application/json"


@dataclass(frozen=True, eq=False)
class Body:
    """One request.

    Attributes:
        number: its place in the run, from 0.
        endpoint: as the server describes it.
        path: with the parts in braces filled in, and a query.
        content: what is sent.
        kind: of the content, for the header.
        names: the fields that were changed; a refusal should name one.
        how: which of the four it is.
    """

    number: int
    endpoint: Endpoint
    path: str
    content: bytes
    names: tuple[str, ...]
    how: str
    kind: str = JSON_TYPE

    def __str__(self) -> str:
        shown = self.content.decode(errors="backslashreplace")
        if len(shown) > 600:
            shown = f"{shown[:600]}... ({len(self.content)} bytes)"
        return f"{self.endpoint.method} {self.path} {shown}"


def plan(found: Sequence[Endpoint], count: int, seed: int) -> list[Body]:
    """What is sent, in order.

    Args:
        found: the endpoints.
        count: bodies, at most; at least the contradictions.
        seed: of everything that is drawn.
    """
    draw = random.Random(f"fuzz {seed}")
    posts = [one for one in found if one.least is not None]
    made = [(one, body, names, "contradiction") for one, body, names in contradictions(posts)]
    whole = max(0, count - len(made))
    broken, bare = round(whole * BROKEN), round(whole * WITHOUT_BODY)
    numbers, others = extremes(posts, draw)
    beside = whole - broken - bare - len(numbers)
    share = min(RANDOM, beside / whole) if beside > LEAST_RANDOM * whole else RANDOM
    made += [
        (one, body, names, "random") for one, body, names in drawn(posts, int(whole * share), draw)
    ]
    extreme = [*numbers, *others][: max(0, count - len(made) - broken - bare)]
    made += [(one, body, (str(field),), "extreme") for one, field, body in extreme]
    items = [(one, _path(one, draw), encoded(body), names, how) for one, body, names, how in made]
    items += [
        (one, one.path, torn(encoded(dict(one.least or {})), draw), (), "broken")
        for one in draw.choices(posts, k=broken)
    ]
    empty = [one for one in found if one.least is None]
    items += [(one, _path(one, draw), b"", (), "bare") for one in draw.choices(empty, k=bare)]
    draw.shuffle(items)
    kinds = [JSON_TYPE] * 200 + ["text/plain", "application/x-www-form-urlencoded", ""]
    return [
        Body(number, *item, kind=draw.choice(kinds) if item[4] == "broken" else JSON_TYPE)
        for number, item in enumerate(items)
    ]


# ---- one field


Extreme = tuple[Endpoint, Field, dict[str, Any]]


def extremes(posts: Sequence[Endpoint], draw: random.Random) -> tuple[list[Extreme], list[Extreme]]:
    """Each field with each extreme of its type, and what is no value of it; both shuffled.

    Returns:
        The numbers that come to the engine, which are what it can die of, and everything else.
    """
    first: list[Extreme] = []
    then: list[Extreme] = []
    for endpoint in posts:
        engine = endpoint.path in GENERATING and endpoint.path != "/invocations"
        for field in endpoint.fields:
            kinds = {kind.split()[-1] for kind in kinds_of(field.schema)}
            numeric = bool(kinds & {"integer", "number"})
            for value in values_for(field.schema):
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                listed = isinstance(value, list) and value and value[0] in (*INTEGERS, *FLOATS)
                wanted = engine and numeric and (number or listed)
                body = placed(dict(endpoint.least or {}), field.path, value)
                (first if wanted else then).append((endpoint, field, body))
    draw.shuffle(first)
    draw.shuffle(then)
    return first, then


# ---- contradictions

# What is right alone and not together, or just beyond what a number holds.
TOGETHER: Sequence[Mapping[str, Any]] = (
    {"n": 2, "seed": 2**63 - 1},
    {"n": 3, "seed": 2**63 - 2},
    {"n": 2, "seed": -(2**63)},
    {"max_tokens": 2**31},
    {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
    {"max_tokens": 2**63},
    {"seed": 2**63},
    {"seed": -(2**63) - 1},
    {"allowed_token_ids": [EOS], "min_tokens": 4},
    {"allowed_token_ids": [1, EOS], "min_tokens": 4},
    {"allowed_token_ids": [97], "bad_words": ["a"]},
    {"allowed_token_ids": [97, 98], "bad_words": ["a", "b"], "min_tokens": 2},
    {"stop_token_ids": ALL, "min_tokens": 4},
    {"stop_token_ids": ALL, "min_tokens": 4, "ignore_eos": True},
    {"stop_token_ids": [97], "allowed_token_ids": [97], "min_tokens": 4},
    {"logit_bias": {str(token): -100 for token in ALL}},
    {"logit_bias": {"97": 100}, "allowed_token_ids": [98]},
    {"logit_bias": {"97": 100}, "bad_words": ["a"], "allowed_token_ids": [97, 98]},
    {"bad_words": [chr(code) for code in range(32, 127)], "min_tokens": 4},
    {"structured_outputs": {"regex": "a+"}, "bad_words": ["a"]},
    {"structured_outputs": {"regex": "a+"}, "allowed_token_ids": [98]},
    {"structured_outputs": {"choice": ["a"]}, "min_tokens": 7},
    {"structured_outputs": {"json_object": True}, "max_tokens": 1},
    {"structured_outputs": []},
    {"structured_outputs": "x"},
    {"vllm_xargs": {"kv_transfer_params": "x"}},
    {"temperature": 0, "n": 2},
    {"temperature": 5e-324},
    {"temperature": 1e-30, "top_p": 5e-324},
    {"temperature": 3.4e38, "repetition_penalty": 3.4e38},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e-46},
    {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 3.4e38},
    {"min_p": 1, "top_p": 5e-324, "top_k": 1},
    {"logprobs": 20, "allowed_token_ids": [97]},
    {"stop": [""], "min_tokens": 4},
    {"vllm_xargs": {"diffusion_stream_prefix": 1, "diffusion_max_steps": 65536}},
    {"vllm_xargs": {"diffusion_stream_prefix": 1, "diffusion_algorithm": "JointThreshold"}},
    {"vllm_xargs": {"diffusion_max_post_edit_steps": 65536, "diffusion_edit_threshold": 0}},
    {"vllm_xargs": {"diffusion_algorithm": "x" * 1_000_000}},
    {"vllm_xargs": {"diffusion_" + "x" * 1_000_000: 1}},
    {"vllm_xargs": {"diffusion_seed_canvas": [2**31] * 32}},
    {"vllm_xargs": {"diffusion_seed_canvas": [97] * 32, "diffusion_pinned": [2**31]}},
    {"vllm_xargs": {"diffusion_read_only": 1, "diffusion_seed_canvas": [97] * 32}, "n": 2},
)


def contradictions(
    posts: Sequence[Endpoint],
) -> Iterator[tuple[Endpoint, dict[str, Any], tuple[str, ...]]]:
    """Each of `TOGETHER` to each endpoint that comes to the engine and knows its fields."""
    for endpoint in posts:
        if endpoint.path not in GENERATING:
            continue
        known = {field.path for field in endpoint.fields}
        for together in TOGETHER:
            body = dict(endpoint.least or {})
            for name, value in together.items():
                path: tuple[str, ...] = (name,)
                if endpoint.path == "/inference/v1/generate":
                    inner = "extra_args" if name == "vllm_xargs" else name
                    path = ("sampling_params", inner)
                if path not in known:
                    break
                body = placed(body, path, value)
            else:
                yield endpoint, body, tuple(together)


# ---- random, and broken


def drawn(
    posts: Sequence[Endpoint], count: int, draw: random.Random
) -> Iterator[tuple[Endpoint, dict[str, Any], tuple[str, ...]]]:
    """Bodies with several options, more of them for the endpoints that matter more."""
    weights = {one.path: weight(one) for one in posts if one.fields}
    for one in posts:
        for _ in range(int(count * weights.get(one.path, 0) / sum(weights.values()))):
            yield one, *body_of(one, draw)


def encoded(body: Any) -> bytes:
    """JSON as Python writes it: nan and inf, which no server that reads it with Python refuses."""
    return json.dumps(body).encode()


def torn(content: bytes, draw: random.Random) -> bytes:
    """A body that was cut off, changed in transit, or is none at all."""
    at = draw.randrange(len(content))
    return draw.choice(
        (
            content[:at],
            content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            content[:at] + b"\xff\xfe" + content[at:],
            b"[" * 100_000,
            b'{"model":' * 2000,
            b'{"model": "m", "model": 5}',
            b'{"prompt": ' + b"9" * 5000 + b"}",
            b"null",
            b"[]",
            b'"x"',
            b"7",
            b"",
            b"\x00" * 100,
        )
    )


def _path(endpoint: Endpoint, draw: random.Random) -> str:
    path = endpoint.path
    while "{" in path:
        before, _, rest = path.partition("{")
        path = before + quote(draw.choice(ODD_WORDS), safe="%") + rest.partition("}")[2]
    if endpoint.queries and draw.random() < 0.7:
        path += f"?{draw.choice(endpoint.queries)}={draw.choice(ODD_WORDS)}"
    return path
