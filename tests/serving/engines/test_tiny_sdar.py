"""The committed, trained checkpoint tiny-sdar: exact to its reference, and as accurate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import sdar_tokenizer
from examples.tiny.training import Encoder, Example
from tests.support.checkpoints import TINY_SDAR
from tests.support.engine import Engine, engine, greedy
from tests.support.reference import MARGIN, Answer
from tests.support.reference_sdar import Reference, Rule

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 4
MOST = 64  # tokens of an answer
# How blocks are committed: what the worker calls it, and what asks for it.
COMMITS: dict[str, tuple[str, bool]] = {
    "two blocks": ("on", True),
    "separate": ("off", True),
    "granted": ("on", False),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=() if c == "two blocks" else pytest.mark.long) for c in COMMITS],
)
def running(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine for each way to commit blocks."""
    fused, asynchronous = COMMITS[request.param]
    options: dict[str, Any] = {"additional_config": {"dllm": {"fused_commit": fused}}}
    options["async_scheduling"] = asynchronous
    # The checkpoint itself says how long its blocks are, and what ends a turn.
    with engine(TINY_SDAR, BLOCK, diffusion_config=None, **options) as started:
        assert started.slots.length == BLOCK
        state = started.runner.model_state
        alone = "granted" if state.policy.fused else "separate"
        assert request.param == ("two blocks" if state.slots.window is not None else alone)
        yield started


def encoded(per_task: int) -> list[Example]:
    tokenizer = sdar_tokenizer()
    encoder = Encoder(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return [encoder(problem) for problem in held_out_set(per_task)]


@pytest.fixture(scope="module")
def wanted() -> list[tuple[Example, Answer]]:
    """63 problems and what the reference answers; a turn ends with either token."""
    tokenizer, reference = sdar_tokenizer(), Reference(TINY_SDAR)
    ends = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return [
        (example, reference.generate(example.prompt, MOST, Rule(threshold=0.9), ends))
        for example in encoded(9)
    ]


def test_equals_the_reference(running: Engine, wanted: list[tuple[Example, Answer]]) -> None:
    """A wrong mask, cache, rule or end of a turn changes tokens; by default, so nothing is asked.

    Random weights (`test_families.py`) never end a turn, and hardly ever decide a whole block.
    """
    robust = [n for n, (_, answer) in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= 50, "too many near ties to compare 50 prompts"
    assert any(count > 1 for n in robust for count in wanted[n][1].decided)
    assert any(1 in wanted[n][1].decided for n in robust)
    got = running.generate([example.prompt for example, _ in wanted], [greedy(MOST)] * len(wanted))
    different = [n for n in robust if got[n][0] != wanted[n][1].tokens]
    assert not different, [wanted[n][0].problem for n in different]


def test_problems_are_answered_rightly(running: Engine) -> None:
    """Weights that the backbone reads wrongly, or a checkpoint that was not trained, fail here."""
    examples = encoded(40)
    assert len(examples) == 280
    got = running.generate([example.prompt for example in examples], [greedy(MOST)] * 280)
    right = sum(tokens == e.answer for (tokens, _), e in zip(got, examples, strict=True))
    assert right >= 0.85 * 280, f"{right} of 280"
