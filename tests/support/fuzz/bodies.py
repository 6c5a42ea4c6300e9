"""The bodies that are sent: one field's extremes, contradictions, random ones, and broken bytes.

All of them come from one seed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.fuzz.endpoints import Endpoint, Field
from tests.support.soak.requests import draw_pool

# Widths of integers that numbers end up in: bytes to 64 bits, and what a float holds exactly.
WIDTHS = (8, 16, 31, 32, 53, 63, 64)
INTEGERS: tuple[int, ...] = (
    *(0, 1, -1, 2, 271, 272, 512, 513),
    *(sign * 2**width + step for width in WIDTHS for sign, step in ((1, -1), (1, 0))),
    *(sign * 2**width + step for width in WIDTHS[1:] for sign, step in ((-1, 0), (-1, -1))),
    *(10**40, -(10**40), 10**400),
)
FLOATS: tuple[float, ...] = (
    *(0.0, -0.0, 0.5, -0.5, 1.0, 1.5, 2.0, math.nan, math.inf, -math.inf),
    *(5e-324, -5e-324, 2.2e-308, 1.7976931348623157e308, -1.7976931348623157e308),
    # The least and the largest of float32, and their neighbours on the far side.
    *(1.4e-45, 1e-46, 1.1754944e-38, 3.4028235e38, 3.4028236e38, -3.5e38, 1e39),
    *(65504.0, 65520.0, 6e-8, 0.9999999999999999, 1.0000000000000002),
)
LONG = "copy ab " * 2000
TEXTS: tuple[str, ...] = ("", " ", "\0", "x", "nan", "1", "é" * 200, "🙂", LONG, "\ud800", "os:x")
ANYTHING: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, -(2**63) - 1, 1.5, math.nan, "", "x", LONG, "\ud800"),
    *([], [[]], [None], [0], [-1], [2**63], [math.nan], [""], ["x", "x"], [{}], ["\ud800"]),
    *({}, {"": 0}, {"a": None}, {"a": 2**63}, {"5": math.nan}, {"type": "x"}, {"a": {"a": []}}),
)
# An object whose keys are token ids, or names.
OBJECTS: tuple[Any, ...] = (
    *({"5": value} for value in FLOATS),
    *({str(value): 1.0} for value in INTEGERS),
    {str(token): -1e30 for token in range(272)},
    {str(token): -100 for token in range(272)},
)
# What somebody might mean.
MODEST: Mapping[str, tuple[Any, ...]] = {
    "boolean": (True, False),
    "integer": (-1, 0, 1, 2, 5, 40),
    "number": (0.0, 0.3, 0.9, 1.0, 2.0),
    "string": ("a", "m", "auto", "required", "none"),
    "array of integer": ([97], [97, 98, 257], []),
    "array of string": (["a"], ["zz", "7", " "], []),
    "object": (
        *({"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}, {"97": 5.0}),
        *({"type": "text"}, {"type": "json_object"}, {"format": {"type": "json_object"}}, {}),
    ),
}
LONGEST = [1] * 70_000
LISTS = {
    "integer": (*([value] for value in INTEGERS), list(range(272)), LONGEST),
    "number": (*([value] for value in FLOATS), LONGEST),
    "string": (*([text] for text in TEXTS), ["x"] * 1000),
    "array": tuple([[value]] for value in INTEGERS),
}


def values_for(field: Field) -> list[Any]:
    """Extremes for every kind of value that a field takes, and a few that it does not."""
    found: list[Any] = []
    for kind in field.kinds:
        if kind == "integer":
            found += [*INTEGERS, math.nan, math.inf, 0.5, 1e39, "1"]
        elif kind == "number":
            found += [*FLOATS, *INTEGERS[-9:], 0, 1, -1, "0.5"]
        elif kind == "string":
            found += TEXTS
        elif kind == "object":
            found += OBJECTS
        else:
            found += LISTS.get(kind.removeprefix("array of "), ())
    found += field.choices
    known = {(type(one), repr(one)) for one in found}
    return found + [value for value in ANYTHING if (type(value), repr(value)) not in known]


def modest_value(field: Field, draw: random.Random) -> Any:
    """A value that a field may have, if anything is known of it."""
    known = [value for kind in field.kinds for value in MODEST.get(kind, ())]
    return draw.choice([*known, *field.choices] or [None])


# Shares of a run; the rest are extremes of single fields.
RANDOM, BROKEN = 0.5, 0.03
JSON_TYPE = "application/json"
MOST_OPTIONS = 4
# Whose wild values are answers that take minutes, rightly.
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens")

# An endpoint, a body for it, and the names of the fields that were changed in it.
Changed = tuple[Endpoint, dict[str, Any], tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Body:
    """One request.

    Attributes:
        number: its place in the run, from 0.
        names: the fields that were changed; a refusal should name one.
        how: ``contradiction``, ``random``, ``extreme`` or ``broken``.
        kind: of the content, for the header.
    """

    number: int
    path: str
    content: bytes
    names: tuple[str, ...]
    how: str
    kind: str

    def __str__(self) -> str:
        shown = self.content.decode(errors="backslashreplace")
        if len(shown) > 600:
            shown = f"{shown[:600]}... ({len(self.content)} bytes)"
        return f"{self.path} {shown}"


def plan(found: Sequence[Endpoint], count: int, seed: int) -> list[Body]:
    """What is sent to these endpoints, in order: at most `count`, at least the contradictions."""
    draw = random.Random(f"fuzz {seed}")
    made = [(*one, "contradiction") for one in contradictions(found)]
    whole = max(0, count - len(made))
    made += [(*one, "random") for one in drawn(found, round(whole * RANDOM), draw)]
    broken = round(whole * BROKEN)
    left = max(0, count - len(made) - broken)
    made += [(*one, "extreme") for one in extremes(found, draw)[:left]]
    items = [(one.path, encoded(body), names, how, JSON_TYPE) for one, body, names, how in made]
    kinds = [JSON_TYPE] * 200 + ["text/plain", "application/x-www-form-urlencoded", ""]
    for one in draw.choices(found, k=broken):
        content = torn(encoded(one.least), draw)
        items.append((one.path, content, (), "broken", draw.choice(kinds)))
    draw.shuffle(items)
    return [Body(number, *item) for number, item in enumerate(items)]


def extremes(found: Sequence[Endpoint], draw: random.Random) -> list[Changed]:
    """Each field with each extreme of its type, and what is no value of it, shuffled.

    The numbers that come to the engine, which are what it can die of, are the first.
    """
    made: list[tuple[bool, Changed]] = []
    for endpoint in found:
        for field in endpoint.fields:
            kinds = {kind.split()[-1] for kind in field.kinds}
            numeric = endpoint.generates and bool(kinds & {"integer", "number"})
            for value in values_for(field):
                one = value[0] if isinstance(value, list) and value else value
                number = isinstance(one, int | float) and not isinstance(one, bool)
                body = placed(endpoint.least, field.path, value)
                made.append((numeric and number, (endpoint, body, (str(field),))))
    draw.shuffle(made)
    made.sort(key=lambda one: not one[0])
    return [changed for _, changed in made]


EOS = 257
ALL = list(range(272))
# What is right alone and not together.
TOGETHER: Sequence[Mapping[str, Any]] = (
    {"n": 2, "seed": 2**63 - 1},
    {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
    {"allowed_token_ids": [EOS], "min_tokens": 4},
    {"stop_token_ids": ALL, "min_tokens": 4, "ignore_eos": True},
    {"logit_bias": {"97": 100}, "bad_words": ["a"], "allowed_token_ids": [97, 98]},
    {"bad_words": [chr(code) for code in range(32, 127)], "min_tokens": 4},
    {"structured_outputs": {"regex": "a+"}, "allowed_token_ids": [98]},
    {"structured_outputs": {"json_object": True}, "max_tokens": 1},
    {"temperature": 0, "n": 2},
    {"temperature": 1e-30, "top_p": 5e-324},
    {"temperature": 3.4e38, "repetition_penalty": 3.4e38},
    {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 3.4e38},
    {"min_p": 1, "top_p": 5e-324, "top_k": 1},
    {"logprobs": 20, "allowed_token_ids": [97]},
    {"vllm_xargs": {"diffusion_stream_prefix": 1, "diffusion_max_steps": 65536}},
    {"vllm_xargs": {"diffusion_stream_prefix": 1, "diffusion_algorithm": "JointThreshold"}},
    {"vllm_xargs": {"diffusion_max_post_edit_steps": 65536, "diffusion_edit_threshold": 0}},
    {"vllm_xargs": {"diffusion_algorithm": "x" * 1_000_000}},
    {"vllm_xargs": {"diffusion_" + "x" * 1_000_000: 1}},
    {"vllm_xargs": {"diffusion_seed_canvas": [97] * 32, "diffusion_pinned": [2**31]}},
    {"vllm_xargs": {"diffusion_read_only": 1, "diffusion_seed_canvas": [97] * 32}, "n": 2},
)


def contradictions(found: Sequence[Endpoint]) -> Iterator[Changed]:
    """Each of `TOGETHER` to each endpoint that comes to the engine and knows its fields."""
    for endpoint in found:
        known = {field.path for field in endpoint.fields}
        for together in TOGETHER if endpoint.generates else ():
            body = dict(endpoint.least)
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


def drawn(found: Sequence[Endpoint], count: int, draw: random.Random) -> Iterator[Changed]:
    """Requests of the soak, without its algorithms, or least ones, with a few further options."""
    pool = draw_pool(200, "mask", draw.randrange(2**31))
    for one in draw.choices([one for one in found if one.generates], k=count):
        ask = draw.choice(pool)
        names = [name for name in ask.body if name != "vllm_xargs" and ask.path == one.path]
        body = {**one.least, **{name: ask.body[name] for name in names}}
        given = draw.sample(one.fields, draw.randint(1, MOST_OPTIONS))
        wild = draw.random() < 0.25
        for field in given:
            free = wild and field.path[-1] not in SHORT
            value = draw.choice(ANYTHING) if free else modest_value(field, draw)
            body = placed(body, field.path, value)
        yield one, body, (*names, *map(str, given))


def placed(body: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with one field more; what stands in its way gives way."""
    name, *rest = path
    if rest:
        inner = body.get(name)
        value = placed(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    return {**body, name: value}


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
            *(b"null", b"[]", b'"x"', b"7", b"", b"\x00" * 100),
        )
    )
