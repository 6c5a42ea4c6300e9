"""The fuzzing itself: nothing is forgotten, and each of its rules can fail. Without a server."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.fuzz.bodies import Body, encoded, extremes, plan
from tests.support.fuzz.client import BROKEN, Reply, error_in
from tests.support.fuzz.endpoints import Endpoint, endpoints
from tests.support.fuzz.rules import site_of, unnamed

POST = {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/x/R"}}}}}}
FIELDS = {
    "seed": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "temperature": {"type": "number"},
    "vllm_xargs": {"type": "object"},
    "stream_options": {"$ref": "#/x/S"},
}
DOCUMENT: dict[str, Any] = {
    "paths": {"/v1/completions": POST, "/health": {"get": {}}, "/sleep": {"post": {}}},
    "components": {
        "schemas": {
            "R": {"type": "object", "properties": FIELDS},
            "S": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
        }
    },
}


def test_an_endpoint_that_nobody_knows_stops_it() -> None:
    unknown = {"paths": DOCUMENT["paths"] | {"/v2/completions": POST}}
    with pytest.raises(ValueError, match="POST /v2/completions: the server opens it"):
        endpoints(DOCUMENT | unknown, "mask")


def completions() -> Endpoint:
    return next(one for one in endpoints(DOCUMENT, "mask") if one.path == "/v1/completions")


def test_fields_are_those_of_the_servers_description() -> None:
    found = {str(field) for field in completions().fields}
    assert {*FIELDS, "stream_options.include_usage"} < found
    assert {"vllm_xargs.diffusion_threshold", "vllm_xargs.diffusion_pinned"} < found
    assert [str(one) for one in endpoints(DOCUMENT, "mask")] == ["/v1/completions", "GET /health"]


def test_numbers_get_every_width() -> None:
    numbers, others = extremes([completions()], random.Random(0))
    sent = [body for _, _, body in (*numbers, *others)]
    seeds = {body["seed"] for body in sent if isinstance(body.get("seed"), int)}
    for width in (8, 16, 31, 32, 53, 63, 64):
        assert {2**width - 1, 2**width} <= seeds
    assert {-(2**63), -(2**63) - 1} <= seeds
    heats = [json.dumps(body["temperature"]) for body in sent if "temperature" in body]
    assert {"NaN", "Infinity", "-Infinity", "5e-324", "1e-46", "3.4028236e+38"} <= set(heats)


def test_a_plan_comes_from_its_seed() -> None:
    found = endpoints(DOCUMENT, "mask")
    once, again, other = (plan(found, 300, seed) for seed in (1, 1, 2))
    assert [str(body) for body in once] == [str(body) for body in again]
    assert [str(body) for body in once] != [str(body) for body in other]
    assert {body.how for body in once} == {"contradiction", "random", "extreme", "broken", "bare"}


def test_a_long_run_sends_every_number() -> None:
    found = endpoints(DOCUMENT, "mask")
    numbers, _ = extremes([completions()], random.Random(0))
    long = plan(found, round(1.4 * len(numbers)), seed=1)
    assert {encoded(body) for _, _, body in numbers} <= {one.content for one in long}


def reply(status: int, text: str = "", names: tuple[str, ...] = ("seed",)) -> Reply:
    return Reply(Body(0, completions(), "/v1/completions", b"{}", names, "random"), status, text, 1)


@pytest.mark.parametrize(("status", "failed"), [(200, 0), (400, 0), (501, 0), (503, 0), (500, 1)])
def test_what_is_a_failure(status: int, failed: int) -> None:
    assert reply(status).failed == bool(failed)
    assert reply(BROKEN).failed


def test_a_refusal_has_to_name_something() -> None:
    assert unnamed(reply(400, "out of range"))
    assert not unnamed(reply(400, "seed is out of range"))
    assert not unnamed(reply(200))
    assert not unnamed(reply(400, "diffusion_x", ("vllm_xargs.kv_transfer_params",)))


def test_an_error_inside_a_stream() -> None:
    good = 'data: {"choices": [{"text": "an error"}]}\n\ndata: [DONE]\n'
    assert error_in(good) is None
    assert error_in('data: {"error": {"code": 500}}\n') == (500, '{"error": {"code": 500}}')
    code = error_in('event: error\ndata: {"error": {"type": "invalid_request_error"}}\n')
    assert code is not None
    assert code[0] == 400
    assert error_in('data: {"type": "x", "error": {"type": "api_error"}}')[0] == 500  # type: ignore[index]


TOLD = "(APIServer pid=7) ERROR 11-23 02:16:47 [vllm_error.py:54] "
LOG = f"""\
{TOLD}Traceback (most recent call last):
{TOLD}  File "/a/site-packages/vllm/v1/engine/output_processor.py", line 246, in from_new_request
{TOLD}    x.get(1)
{TOLD}  File "/a/lib/somewhere.py", line 3, in get
{TOLD}AttributeError: 'str' object has no attribute 'get'
{TOLD}
{TOLD}The above exception was the direct cause of the following exception:
{TOLD}
{TOLD}Traceback (most recent call last):
{TOLD}  File "/a/site-packages/vllm/v1/engine/async_llm.py", line 820, in generate
{TOLD}vllm.v1.engine.exceptions.EngineGenerateError
"""
DEAD = """\
Traceback (most recent call last):
  File "/a/site-packages/vllm/v1/engine/core_client.py", line 1235, in get_output_async
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def test_where_something_was_raised() -> None:
    site = site_of(LOG)
    assert site is not None
    assert site.key == ("vllm/v1/engine/output_processor.py", "from_new_request")
    assert (site.line, site.error) == (246, "AttributeError: 'str' object has no attribute 'get'")
    # What the others are told of a dead engine is no cause.
    assert site_of(LOG + DEAD) == site
    assert site_of("INFO all is well") is None
