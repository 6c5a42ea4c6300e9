"""The logprobs of a trace are those that the request gets, or would get."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import count_calls, engine
from tests.support.mixed_requests import FAMILIES, completions, mixed

pytestmark = pytest.mark.engine


def reads_no_rows(family: str, options: dict[str, Any]) -> bool:
    """Whether the logprob of a chosen token follows from what its algorithm reads."""
    if {"regex", "presence_penalty"} & options.keys():
        return False
    if options["extra_args"]["diffusion_algorithm"] == "Credit":
        return False
    return family != "gemma" or (options["temperature"] > 0 and "top_p" not in options)


def varied(family: str, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Mixed requests; some with a filter and some with a bias, none with `n` or logprobs."""
    found = []
    for index, (prompt, options) in enumerate(mixed(family, count)):
        kept = {key: value for key, value in options.items() if key not in ("logprobs", "n")}
        if kept["temperature"] > 0 and index % 2:
            kept |= {"top_p": 0.8, "top_k": 20}
        if index % 5 == 0 and "regex" not in kept:
            kept["presence_penalty"] = 0.5
        found.append((prompt, kept))
    return found


@pytest.mark.parametrize(
    "family",
    ["llada2", *(pytest.param(f, marks=pytest.mark.long) for f in ("sdar", "gemma"))],
)
def test_logprobs_are_those_that_a_request_gets(family: str) -> None:
    """Also where they are the logarithm of what the algorithm has read, and no rows of logits are.

    A float32 probability is the true one up to some roundings of 2^-24, and so is its logarithm.
    """
    path, length, _, _ = FAMILIES[family]
    asked = varied(family, 40)
    reported = [(prompt, options | {"logprobs": 0}) for prompt, options in asked]
    only = {"diffusion_trace": True}
    text_only = TEXT_ONLY_OPTIONS if family == "gemma" else {}
    with engine(path, length, max_num_seqs=24, **text_only) as running:
        captured = count_calls(running.runner.model_state.parts.logprobs, "capture")
        completions(running, [one for one in asked if reads_no_rows(family, one[1])], only)
        assert not captured, "no rows of logits"
        light = completions(running, asked, only)
        heavy = completions(running, reported, only)
    for (one,), (other,) in zip(light, heavy, strict=True):
        mine, theirs = one.diffusion_trace, other.diffusion_trace
        assert one.token_ids == other.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-6)
        assert mine.probabilities == pytest.approx(theirs.probabilities, abs=1e-6)
