"""Nemotron-Labs-Diffusion: what its canvases do, and drafts that its causal pass verifies.

LinearSpec is compared with greedy decoding of the same weights by vLLM's own Ministral 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from examples.tiny.tokens import sdar_tokenizer
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.families import CONTEXT, WAYS, dllm, prompt
from tests.support.reference import MARGIN
from tests.support.reference_nemotron import (
    MASK,
    Reference,
    Rule,
    autoregressive_checkpoint,
    random_checkpoint,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, SHORT_CONTEXT = 8, 93
# The context ends within a canvas, and within an answer.
SHORT: dict[str, Any] = {"max_model_len": 107}
EVERY = WAYS | {
    "the context ends": SHORT,
    "the context ends, a step ahead": SHORT | {"async_scheduling": True},
}
QUICK = ("plain", "preempted, a step ahead")
SOME = (
    *("sync, a step ahead", "chunks, a step ahead", "preempted, a step ahead"),
    "the context ends, a step ahead",
)
OPTIONS = {"diffusion_algorithm": "LinearSpec"}


def answers(running: Any, asked: list[tuple[list[int], int]], **options: Any) -> list[list[int]]:
    """The tokens of prompts, asked together."""
    params = [greedy(count, ignore_eos=True, **options) for _, count in asked]
    return [tokens for tokens, _ in running.generate([one for one, _ in asked], params)]


@pytest.mark.parametrize(
    ("block", "likely", "count", "names"),
    [
        pytest.param(8, 5, 24, QUICK, id="8-quick"),
        *(
            pytest.param(block, likely, 200, names, id=f"{block}-{likely}", marks=pytest.mark.long)
            for block, likely, names in (
                (8, 5, tuple(EVERY)),
                (5, 3, SOME),
                (32, 2, SOME),
                (8, 300, QUICK),
            )
        ),
    ],
)
def test_the_answer_is_that_of_greedy_decoding(
    tmp_path: Path, block: int, likely: int, count: int, names: tuple[str, ...]
) -> None:
    """Token for token, alone and together."""
    model = random_checkpoint(tmp_path / "model", block, likely)
    backbone = autoregressive_checkpoint(tmp_path / "backbone", of=model)
    asked = [(prompt(n, 1 + n * 7 % 90, [MASK]), 1 + n * 5 % 40) for n in range(count)]
    with engine(backbone, 0, diffusion_config=None) as running:
        wanted = answers(running, asked, logit_bias={MASK: -100.0})
    reference = Reference(model)
    margins = [
        reference.greedy_margin(one, tokens) for (one, _), tokens in zip(asked, wanted, strict=True)
    ]
    assert min(margins) > -MARGIN, "vLLM's own answer is not the greedy one"
    robust = [n for n, margin in enumerate(margins) if margin > MARGIN]
    assert len(robust) >= 0.98 * count, "too many near ties to compare"
    for name in names:
        options = {"diffusion_config": None, "max_model_len": CONTEXT} | EVERY[name]
        room = options["max_model_len"]
        fit = [tokens[: room - len(one)] for (one, _), tokens in zip(asked, wanted, strict=True)]
        with engine(model, 0, **options) as running:
            preempted = count_calls(running.scheduler, "_preempt_request")
            for _ in range(2):  # the second time prompts come out of the cache
                found = answers(running, asked, **OPTIONS)
                assert not [n for n in robust if found[n] != fit[n]], name
            assert bool(preempted) == name.startswith("preempted"), name
            for n in robust[::4]:
                assert answers(running, [asked[n]], **OPTIONS) == [fit[n]], (name, n)
            running.assert_idle()


def test_linear_spec_keeps_as_much_of_a_draft_as_the_loop(tmp_path: Path) -> None:
    """As many passes, and at least one draft of which several tokens were right."""
    model = random_checkpoint(tmp_path, 8, likely=2)
    reference = Reference(model)
    prompts = [prompt(n, 2 + 3 * n) for n in range(12)]
    wanted = [reference.linear_spec(one, 40) for one in prompts]
    with engine(model, 8, diffusion_config=None, **dllm(passes_per_step=1)) as alone:
        passes = count_calls(alone.scheduler, "make_spec_decoding_stats")
        params = greedy(40, ignore_eos=True, **OPTIONS)
        for one, (tokens, rounds) in zip(prompts, wanted, strict=True):
            passes.clear()
            assert alone.generate([one], [params])[0][0] == tokens
            assert len(passes) == 2 * rounds
    assert min(rounds for _, rounds in wanted) < 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = random_checkpoint(tmp_path_factory.mktemp("nemotron"), BLOCK)
    sdar_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def running(path: Path) -> Iterator[Engine]:
    options: dict[str, Any] = {"max_model_len": SHORT_CONTEXT, "async_scheduling": True}
    with engine(path, BLOCK, diffusion_config=None, max_num_seqs=64, **options) as started:
        yield started


@pytest.mark.parametrize("rule", [Rule(threshold=0.2), Rule("LowConfidenceEven"), Rule("Leftmost")])
def test_the_context_ends_within_a_canvas(path: Path, running: Engine, rule: Rule) -> None:
    """The positions behind its end do not exist, and decide nothing."""
    reference = Reference(path)
    prompts = [
        prompt(n, length) for n, length in enumerate(range(SHORT_CONTEXT - 20, SHORT_CONTEXT))
    ]
    wanted = [reference.generate(one, 100, rule, room=SHORT_CONTEXT) for one in prompts]
    asked = [greedy(100, ignore_eos=True, **rule.options()) for _ in prompts]
    found = running.generate(prompts, asked)
    robust = [n for n, answer in enumerate(wanted) if answer.margin > 3e-5]
    assert len(robust) >= 18
    for n in robust:
        assert found[n] == (wanted[n].tokens, "length"), n
        assert running.generate([prompts[n]], [asked[n]])[0] == found[n]


def test_linear_spec_beside_other_rules(path: Path, running: Engine) -> None:
    """In one batch with draws, constraints and traces, which are as alone, too."""
    reference, decode, pattern = Reference(path), sdar_tokenizer().decode, "x[a-c]{3,30}y"
    follows = {"structured_outputs": StructuredOutputsParams(regex=pattern)}
    kinds = [
        greedy(30, ignore_eos=True, diffusion_algorithm="LinearSpec"),
        SamplingParams(max_tokens=30, ignore_eos=True, seed=1, top_k=40),
        SamplingParams(max_tokens=35, seed=2, temperature=1.2, **follows),
        greedy(30, ignore_eos=True, diffusion_trace=True, logprobs=1),
        greedy(35, **follows),
    ]
    prompts = [prompt(n, 2 + 3 * n) for n in range(20)]
    asked = [kinds[n % 5] for n in range(20)]
    together = running.generate(prompts, asked)
    for n, (tokens, _) in enumerate(together):
        assert running.generate([prompts[n]], [asked[n]])[0] == together[n]
        if n % 5 == 0:
            assert reference.greedy_margin(prompts[n], tokens) > -3e-5
            assert len(tokens) == 30
        elif asked[n].structured_outputs:
            # Not vLLM's text, which begins with the end of a prompt that is no UTF-8. The last
            # token ends the answer.
            assert re.fullmatch(pattern, decode(tokens[:-1])), n
