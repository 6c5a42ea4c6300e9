"""The committed, trained checkpoints: exact to their references, and as accurate as they were.

Random weights (`test_families.py`) never end a turn, and hardly ever decide a whole block at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder, Example
from tests.support import reference_llada2, reference_sdar
from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from tests.support.engine import Engine, engine, greedy
from tests.support.families import dllm
from tests.support.reference import MARGIN, Reference, Rule

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MOST = 64  # tokens of an answer


@dataclass(frozen=True)
class Model:
    """A trained checkpoint, its reference, a rule, and the options that ask for it."""

    path: Path
    reference: Reference
    encoder: Encoder
    ends: tuple[int, ...]
    rule: Rule
    options: dict[str, Any]

    def encoded(self, per_task: int) -> list[Example]:
        return [self.encoder(problem) for problem in held_out_set(per_task)]


def llada2() -> Model:
    tokenizer = llada2_tokenizer()
    reference = reference_llada2.Reference.load(TINY_LLADA2, 32, tokenizer.mask_token_id)
    ends = (tokenizer.eos_token_id,)
    rule, options = Rule(threshold=0.9), {"diffusion_threshold": 0.9}
    return Model(TINY_LLADA2, reference, Encoder(tokenizer), ends, rule, options)


def sdar() -> Model:
    """A turn ends with either token; its rule is the default."""
    tokenizer, reference = sdar_tokenizer(), reference_sdar.Reference(TINY_SDAR)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = (tokenizer.eos_token_id, end)
    return Model(TINY_SDAR, reference, Encoder(tokenizer, end), ends, reference_sdar.Rule(), {})


# What an engine is started with: SDAR's for each way to commit blocks.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llada2": (llada2, {}),
    "sdar-two-blocks": (sdar, dllm(fused_commit="on") | {"async_scheduling": True}),
    "sdar-separate": (sdar, dllm(fused_commit="off") | {"async_scheduling": True}),
    "sdar-granted": (sdar, dllm(fused_commit="on") | {"async_scheduling": False}),
}
QUICK = ("llada2", "sdar-two-blocks")


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in CASES],
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Model, Engine]]:
    make, options = CASES[request.param]
    model: Model = make()
    # The checkpoint itself says how long its blocks are, and what ends a turn.
    own: dict[str, Any] = {"diffusion_config": None}
    with engine(model.path, 0, **(own | options)) as running:
        assert running.slots.length == model.reference.block
        assert (running.runner.model_state.parts.window is not None) == request.param.endswith(
            "two-blocks"
        )
        yield model, running


def test_equals_the_reference(served: tuple[Model, Engine]) -> None:
    """A wrong mask, cache, rule or end of a turn changes tokens. Most answers are right."""
    model, running = served
    examples = model.encoded(9)
    prompts = [example.prompt for example in examples]
    wanted = [model.reference.generate(one, MOST, model.rule, model.ends) for one in prompts]
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= 50, "too many near ties to compare 50 prompts"
    steps = [count for n in robust for count in wanted[n].decided]
    assert min(steps) == 1 < max(steps)
    got = running.generate(prompts, [greedy(MOST, **model.options)] * len(prompts))
    different = [n for n in robust if got[n][0] != wanted[n].tokens]
    assert not different, different
    right = sum(tokens == e.answer for (tokens, _), e in zip(got, examples, strict=True))
    assert right >= 0.85 * len(examples)
