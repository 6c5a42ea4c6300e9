"""A threshold that follows the load: what each step decides by it, and who keeps their own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer
from examples.tiny.training import Encoder
from tests.support.checkpoints import TINY_LLADA2
from tests.support.engine import Engine, engine, greedy
from vllm_dllm.settings.server import ThresholdUnderLoad
from vllm_dllm.tracing.trace import Trace

pytestmark = pytest.mark.engine

RULE = {"from": 1.0, "to": 0.5, "at_requests": 4}
AT = ThresholdUnderLoad.parse(RULE).at
GAUGE = "vllm:diffusion_threshold_under_load"


def ask(running: Engine, prompts: list[list[int]], own: list[float | None]) -> list[Trace]:
    """The traces of prompts that are asked together, some with a threshold of their own."""
    params = [
        greedy(64, diffusion_trace=True, **({} if it is None else {"diffusion_threshold": it}))
        for it in own
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = running.llm.generate(asked, params, use_tqdm=False)
    return [output.outputs[0].diffusion_trace for output in outputs]


def decided(trace: Trace) -> tuple[list[int], list[float]]:
    return trace.step_maps, trace.probabilities


def thresholds(trace: Trace) -> list[float | None]:
    return [each.threshold for block in trace.blocks for each in block.passes]


def check(trace: Trace, requests: Counter[int]) -> None:
    """Each pass has the threshold of its step, and decides what is surer, or one position."""
    for block in trace.blocks:
        for each in block.passes:
            assert each.threshold == AT(requests[each.engine_step])
            events = [event for event in block.events if event.step == each.step]
            if each.kind == "denoise" and len(events) > 1:
                assert min(event.probability for event in events) > each.threshold


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"enforce_eager": False, "async_scheduling": True}, marks=pytest.mark.long),
        pytest.param({"additional_config": {"fused_commit": "on"}}, marks=pytest.mark.long),
    ],
    ids=["plain", "compiled and asynchronous", "fused"],
)
def test_thresholds_of_steps(options: dict[str, Any]) -> None:
    encoder = Encoder(llada2_tokenizer())
    prompts = [encoder(problem).prompt for problem in held_out_set(1)[-3:]]
    section = {"threshold_under_load": RULE, **options.pop("additional_config", {})}
    options["additional_config"] = {"dllm": section}
    with engine(TINY_LLADA2, 32, disable_log_stats=False, **options) as running:
        alone, careful, fast, own = (
            ask(running, prompts[:1], [it])[0] for it in (None, 1.0, 0.5, 0.8)
        )
        together = ask(running, prompts[:1] * 4, [None] * 4)
        mixed = ask(running, prompts[::-1], [None, None, 0.8])
        gauges = [each for each in running.llm.get_metrics() if each.name == GAUGE]
        assert [each.value for each in gauges] == [AT(0)]
    assert {*thresholds(alone)} == {1.0}
    assert decided(alone) == decided(careful) != decided(fast)
    for trace in together:  # all begin and end together
        assert {*thresholds(trace)} == {0.5}
        assert decided(trace) == decided(fast)
    assert {*thresholds(mixed[2])} == {*thresholds(own)} == {None}
    assert decided(mixed[2]) == decided(own)
    requests = Counter(
        each.engine_step for trace in mixed for block in trace.blocks for each in block.passes
    )
    for trace in mixed[:2]:
        check(trace, requests)
    assert 0.666667 in {it for trace in mixed[:2] for it in thresholds(trace)}
