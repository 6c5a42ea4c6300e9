"""The committed, trained checkpoint: exact to its reference, and as accurate with fewer steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.tiny.tasks import TASKS, held_out_set
from examples.tiny.tokens import llada2_tokenizer
from examples.tiny.training import Encoder, Example
from tests.support.checkpoints import TINY_LLADA2
from tests.support.engine import Engine, engine, greedy
from tests.support.reference import MARGIN, Rule
from tests.support.reference_llada2 import Reference
from tests.support.statistics import wilson_interval

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
ONE_AT_A_TIME = 1.01


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine(TINY_LLADA2, BLOCK, disable_log_stats=False) as started:
        yield started


def encoded(per_task: int) -> list[Example]:
    encoder = Encoder(llada2_tokenizer())
    return [encoder(problem) for problem in held_out_set(per_task)]


def test_equals_the_reference(running: Engine) -> None:
    tokenizer = llada2_tokenizer()
    reference = Reference.load(TINY_LLADA2, BLOCK, tokenizer.mask_token_id)
    examples = encoded(9)[: 8 * len(TASKS) + 7]
    rule, ends = Rule(threshold=0.9), (tokenizer.eos_token_id,)
    wanted = [reference.generate(example.prompt, 64, rule, ends) for example in examples]
    robust = [i for i, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= 50, "too many near ties to compare 50 prompts"
    params = [greedy(64, diffusion_threshold=0.9) for _ in examples]
    got = running.generate([example.prompt for example in examples], params)
    different = [i for i in robust if got[i][0] != wanted[i].tokens]
    assert not different, [examples[i].problem for i in different]


@pytest.mark.long
def test_fewer_steps_are_as_accurate(running: Engine) -> None:
    examples = encoded(30)
    right, steps = {}, {}
    for threshold in (0.9, ONE_AT_A_TIME):
        before = denoise_steps(running)
        params = [greedy(64, diffusion_threshold=threshold) for _ in examples]
        got = running.generate([example.prompt for example in examples], params)
        steps[threshold] = denoise_steps(running) - before
        hits = [tokens == e.answer for (tokens, _), e in zip(got, examples, strict=True)]
        right[threshold] = sum(hits)
    low, high = wilson_interval(right[ONE_AT_A_TIME], len(examples))
    assert low <= right[0.9] / len(examples) <= high
    assert 2 * steps[0.9] <= steps[ONE_AT_A_TIME]
    assert right[ONE_AT_A_TIME] >= 0.8 * len(examples)


def denoise_steps(running: Engine) -> float:
    name = "vllm:diffusion_num_denoising_steps"
    return sum(metric.value for metric in running.llm.get_metrics() if metric.name == name)
