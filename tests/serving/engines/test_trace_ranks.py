"""Traces of an engine with several ranks are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.child import in_child
from tests.support.engine import engine, settings
from tests.support.mixed_requests import FAMILIES, completions, mixed

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

COUNT = 30
CLOCK = ("engine_step", "milliseconds")  # differ from run to run
ROUNDED = ("probability", "logprob")


def told(running: Any, family: str) -> list[list[tuple[list[int], dict[str, Any]]]]:
    """Tokens and trace of every answer to every request."""
    found = completions(running, list(mixed(family, COUNT)), {"diffusion_trace": True})
    return [[(list(o.token_ids), o.diffusion_trace.as_json()) for o in each] for each in found]


def by_ranks(family: str, options: dict[str, Any]) -> Iterator[Any]:
    """The same of an engine with several ranks, in a process of its own."""
    from vllm import LLM

    path, length, _, _ = FAMILIES[family]
    llm = LLM(model=str(path), **(settings(length) | options))
    yield told(SimpleNamespace(llm=llm), family)


def compared(trace: dict[str, Any]) -> tuple[Any, list[float]]:
    """What is the same in every run, and the numbers that ranks add up in another order."""
    floats = [*trace["probabilities"], *trace["logprobs"]]
    blocks = []
    for block in trace["blocks"]:
        floats += [event[name] or 0.0 for event in block["events"] for name in ROUNDED]
        events = [{k: v for k, v in e.items() if k not in ROUNDED} for e in block["events"]]
        # Who waited for whom depends on the batch, which ranks do not change.
        passes = [{k: v for k, v in p.items() if k not in CLOCK} for p in block["passes"]]
        blocks.append(block | {"events": events, "passes": passes})
    rest = {k: v for k, v in trace.items() if k not in ("probabilities", "logprobs")}
    return rest | {"blocks": blocks}, floats


@pytest.mark.parametrize(
    ("family", "axis"),
    [
        (family, axis)
        for family in FAMILIES
        for axis in ("tensor_parallel_size", "pipeline_parallel_size")
        if (family, axis) != ("gemma", "pipeline_parallel_size")
    ],
)
def test_two_ranks(family: str, axis: str) -> None:
    path, length, _, _ = FAMILIES[family]
    # A pipeline has no pass that commits one canvas and denoises the next.
    apart = {"additional_config": {"dllm": {"fused_commit": "off"}}}
    options = TEXT_ONLY_OPTIONS if family == "gemma" else apart
    (two,) = in_child(by_ranks, family, options | {axis: 2})
    with engine(path, length, **options) as running:
        one = told(running, family)
    for outputs, others in zip(one, two, strict=True):
        for (tokens, trace), (their_tokens, their_trace) in zip(outputs, others, strict=True):
            assert tokens == their_tokens
            (same, floats), (theirs, their_floats) = compared(trace), compared(their_trace)
            assert same == theirs
            assert floats == pytest.approx(their_floats, abs=1e-4)
