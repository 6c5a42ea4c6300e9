"""A real server of each family without a tiny checkpoint: answers, streams, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference_diffcoder, reference_fast_dllm, reference_nemotron
from tests.support.checkpoints import TINY_SDAR
from tests.support.reference_llada22 import random_checkpoint22
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

BLOCK = 8
REGEX = {"structured_outputs": {"regex": "[ab]{3,9}"}}
LINEAR = {"vllm_xargs": {"diffusion_algorithm": "LinearSpec"}}
STREAMED = {"vllm_xargs": {"diffusion_stream_prefix": True}}
Options = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """A family, and what its requests may ask for.

    Attributes:
        make: writes a checkpoint of random weights.
        given: requests that are answered.
        refused: requests that get status 400, and the words that its message has.
        overrides: what a user states of a checkpoint whose tokenizer does not name the mask.
    """

    make: Callable[[Path], object]
    given: tuple[Options, ...]
    refused: tuple[tuple[Options, tuple[str, ...]], ...]
    overrides: Options | None = None


def excluded(by: str, beside: Options) -> tuple[tuple[Options, tuple[str, ...]], ...]:
    """Everything that an algorithm or a model which reads no rows cannot give."""
    asked: tuple[tuple[str, Options], ...] = (
        ("structured_outputs", REGEX),
        ("logprobs", {"logprobs": 2}),
        ("logit_bias", {"logit_bias": {"65": 3}}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("bad_words", {"bad_words": ["a"]}),
        ("min_tokens", {"min_tokens": 3}),
    )
    return tuple((beside | options, (name, by)) for name, options in asked)


FAMILIES = {
    "Stable-DiffCoder": Served(
        reference_diffcoder.random_checkpoint,
        (REGEX, {"logprobs": 2}, {"presence_penalty": 0.5}, {"temperature": 0.8, "seed": 3}),
        ((LINEAR, ("LinearSpec verifies", "this model has none")),),
        {"mask_token_id": reference_diffcoder.MASK},
    ),
    "Nemotron-Labs-Diffusion": Served(
        partial(reference_nemotron.random_checkpoint, block=BLOCK),
        (REGEX, {"logprobs": 2}, {"temperature": 0.8, "seed": 3}, LINEAR),
        (
            (STREAMED, ("diffusion_stream_prefix", "this model")),
            (LINEAR | {"temperature": 0.8}, ("temperature", "LinearSpec")),
            *excluded("LinearSpec", LINEAR),
        ),
    ),
    "Fast-dLLM v2": Served(
        partial(reference_fast_dllm.random_checkpoint, block=BLOCK),
        (
            {"temperature": 0.8, "seed": 3},
            {"vllm_xargs": {"diffusion_algorithm": "SubBlocks-Parallel"}},
        ),
        excluded("this model", {}),
        {"mask_token_id": reference_fast_dllm.MASK},
    ),
    "LLaDA2.2": Served(
        partial(random_checkpoint22, block=32),
        (REGEX | {"vllm_xargs": {"diffusion_algorithm": "LowConfidence"}},),
        (
            ({"temperature": 0.8}, ("temperature", "JointThresholdInDel")),
            (STREAMED, ("diffusion_stream_prefix", "JointThresholdInDel")),
            *excluded("JointThresholdInDel", {}),
        ),
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Served]]:
    scratch = tmp_path_factory.mktemp("family")
    family = FAMILIES[request.param]
    family.make(scratch / "model")
    # The tiny models' tokenizer, because a chat needs a template.
    flags = ["--tokenizer", str(TINY_SDAR)]
    if family.overrides is not None:
        flags += ["--hf-overrides", json.dumps(family.overrides)]
    with Server(scratch / "model", *flags, log=scratch / "log", start_seconds=300) as server:
        yield server, family


def test_a_completion_is_answered_as_a_stream_is(running: tuple[Server, Served]) -> None:
    server, _ = running
    prompt = [70 + n for n in range(19)]
    whole = server.complete(prompt, 40, ignore_eos=True)["token_ids"]
    assert len(whole) == 40
    parts = server.stream(prompt, 40, ignore_eos=True)
    assert len(parts) > 1
    assert [token for part in parts for token in part] == whole


def test_a_chat_is_answered(running: tuple[Server, Served]) -> None:
    server, _ = running
    messages = [{"role": "user", "content": "sort 61 35"}]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=24)
    assert answer.status_code == 200, answer.text
    assert 0 < answer.json()["usage"]["completion_tokens"] <= 24


def test_what_is_not_excluded_is_given(running: tuple[Server, Served]) -> None:
    server, family = running
    for options in family.given:
        answer = server.complete("sort 61 35", 16, **options)
        if "structured_outputs" in options:
            assert re.fullmatch("[ab]{3,9}", answer["text"]), options
        if "logprobs" in options:
            assert len(answer["logprobs"]["token_logprobs"]) == len(answer["token_ids"])


def test_what_is_excluded_is_refused_by_name(running: tuple[Server, Served]) -> None:
    server, family = running
    for options, words in family.refused:
        answer = server.post("/v1/completions", prompt="sort 61 35", max_tokens=8, **options)
        assert answer.status_code == 400, (options, answer.text)
        message = answer.json()["error"]["message"]
        assert all(word in message for word in words), (options, message)
