"""What requests may ask of Nemotron-Labs-Diffusion beside tokens, and what they may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from examples.tiny.tokens import sdar_tokenizer
from tests.support.engine import Engine, engine, greedy
from tests.support.families import prompt
from tests.support.ops.chi_square import limit
from tests.support.reference_nemotron import MASK, Reference, Rule, random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, CONTEXT, SEEDS = 8, 93, 800
GIVEN = prompt(0, 21)
ONE_STEP = {"diffusion_max_steps": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = random_checkpoint(tmp_path_factory.mktemp("nemotron"), BLOCK)
    sdar_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def running(path: Path) -> Iterator[Engine]:
    options: dict[str, Any] = {"max_model_len": CONTEXT, "async_scheduling": True}
    with engine(path, BLOCK, diffusion_config=None, max_num_seqs=64, **options) as started:
        yield started


def drawn(seed: int, count: int = BLOCK, **options: Any) -> SamplingParams:
    extra = {name: options.pop(name) for name in list(options) if name.startswith("diffusion_")}
    return SamplingParams(
        **({"temperature": 1.0, "ignore_eos": True} | options),
        seed=seed,
        max_tokens=count,
        extra_args=extra or None,
    )


def test_draws_follow_the_distribution(path: Path, running: Engine) -> None:
    """That of the model without the mask, at the request's temperature."""
    logits = Reference(path).logits(GIVEN + [MASK] * BLOCK, len(GIVEN))[len(GIVEN)]
    for temperature in (0.7, 1.3):
        asked = [drawn(seed, 1, temperature=temperature, **ONE_STEP) for seed in range(SEEDS)]
        found = [tokens[0] for tokens, _ in running.generate([GIVEN] * SEEDS, asked)]
        expected = (logits / temperature).softmax(-1)
        assert MASK not in found
        common = expected * SEEDS >= 10
        counts = torch.bincount(torch.tensor(found), minlength=len(expected)).float()
        wanted = torch.cat([expected[common] * SEEDS, expected[~common].sum()[None] * SEEDS])
        counts = torch.cat([counts[common], counts[~common].sum()[None]])
        assert ((counts - wanted) ** 2 / wanted).sum() < limit(len(wanted))


def test_drawn_answers_do_not_depend_on_the_batch(running: Engine) -> None:
    prompts = [prompt(n, 3 + 5 * n) for n in range(12)]
    asked = [drawn(n, 30, diffusion_threshold=0.3, top_k=40) for n in range(12)]
    together = running.generate(prompts, asked)
    assert together == running.generate(prompts, asked)
    alone = [running.generate([p], [q])[0] for p, q in zip(prompts, asked, strict=True)]
    assert together == alone
    assert len({tuple(tokens) for tokens, _ in together}) == 12


@pytest.mark.parametrize("rule", [Rule(threshold=0.2), Rule("LowConfidenceEven"), Rule("Leftmost")])
def test_the_context_ends_within_a_canvas(path: Path, running: Engine, rule: Rule) -> None:
    """The positions behind its end do not exist, and decide nothing."""
    reference = Reference(path)
    prompts = [prompt(n, length) for n, length in enumerate(range(CONTEXT - 20, CONTEXT))]
    wanted = [reference.generate(one, 100, rule, room=CONTEXT) for one in prompts]
    asked = [greedy(100, ignore_eos=True, **rule.options()) for _ in prompts]
    found = running.generate(prompts, asked)
    robust = [n for n, answer in enumerate(wanted) if answer.margin > 3e-5]
    assert len(robust) >= 18
    for n in robust:
        assert found[n] == (wanted[n].tokens, "length"), n
        assert running.generate([prompts[n]], [asked[n]])[0] == found[n]


def test_logprobs_are_those_of_the_step_that_decided(path: Path, running: Engine) -> None:
    logits = Reference(path).logits(GIVEN + [MASK] * BLOCK, len(GIVEN))[len(GIVEN) :]
    wanted = logits.log_softmax(-1).amax(-1)
    params = greedy(BLOCK, ignore_eos=True, logprobs=2, **ONE_STEP)
    (output,) = running.llm.generate([{"prompt_token_ids": GIVEN}], [params], use_tqdm=False)
    answer = output.outputs[0]
    found = [
        row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=1e-4)


def test_a_trace_says_how_many_positions_each_step_decided(path: Path, running: Engine) -> None:
    rule = Rule(threshold=0.2)
    wanted = Reference(path).generate(GIVEN, 3 * BLOCK, rule)
    params = greedy(3 * BLOCK, ignore_eos=True, diffusion_trace=True, **rule.options())
    (output,) = running.llm.generate([{"prompt_token_ids": GIVEN}], [params], use_tqdm=False)
    answer = output.outputs[0]
    assert list(answer.token_ids) == wanted.tokens
    counts: list[int] = []
    for block in range(3):
        steps = answer.diffusion_trace.step_maps[block * BLOCK : (block + 1) * BLOCK]
        counts += [steps.count(step) for step in sorted(set(steps))]
    assert counts == wanted.decided


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_constraints_are_followed(running: Engine, temperature: float) -> None:
    """Over the edges of canvases, and to their end, alone and beside others."""
    pattern = "x[a-c]{3,30}y"
    constraint = StructuredOutputsParams(regex=pattern)
    prompts = [prompt(n, 2 + 3 * n) for n in range(12)]
    asked = [
        drawn(n, 35, temperature=temperature, ignore_eos=False, structured_outputs=constraint)
        if n % 3
        else drawn(n, 20)
        for n in range(12)
    ]
    given, tokenizer = [{"prompt_token_ids": one} for one in prompts], sdar_tokenizer()
    together = running.llm.generate(given, asked, use_tqdm=False)
    for n, output in enumerate(together):
        if n % 3:
            # Not vLLM's text, which begins with the end of a prompt that is no UTF-8. The last
            # token ends the answer.
            text = tokenizer.decode(output.outputs[0].token_ids[:-1])
            assert re.fullmatch(pattern, text), n
            alone = running.llm.generate([given[n]], [asked[n]], use_tqdm=False)[0]
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"logprobs": 1}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, "structured_outputs"),
        ({"diffusion_trace": True}, "diffusion_trace"),
        ({"diffusion_stream_prefix": True}, "diffusion_stream_prefix"),
        ({"diffusion_steps": 3}, "diffusion_steps"),
    ],
)
def test_what_linear_spec_excludes(running: Engine, options: dict[str, Any], named: str) -> None:
    asked = {"temperature": 0.0, "diffusion_algorithm": "LinearSpec"} | options
    with pytest.raises(VLLMValidationError, match=named):
        running.generate([GIVEN], [drawn(0, **asked)])


def test_a_canvas_does_not_leave_in_parts(running: Engine) -> None:
    with pytest.raises(VLLMValidationError, match="diffusion_stream_prefix"):
        running.generate([GIVEN], [drawn(0, diffusion_stream_prefix=True)])


def test_linear_spec_beside_other_rules(path: Path, running: Engine) -> None:
    """In one batch with draws, constraints and traces: its answers are the greedy ones."""
    reference = Reference(path)
    constraint = StructuredOutputsParams(regex="[a-c]{3,30}")
    kinds = [
        greedy(30, ignore_eos=True, diffusion_algorithm="LinearSpec"),
        drawn(1, 30, diffusion_threshold=0.3),
        drawn(2, 31, ignore_eos=False, structured_outputs=constraint),
        greedy(30, ignore_eos=True, diffusion_trace=True, logprobs=1),
    ]
    prompts = [prompt(n, 2 + 3 * n) for n in range(20)]
    asked = [kinds[n % 4] for n in range(20)]
    together = running.generate(prompts, asked)
    for n in range(20):
        if n % 4 == 0:
            assert reference.greedy_margin(prompts[n], together[n][0]) > -3e-5
            assert len(together[n][0]) == 30
        assert running.generate([prompts[n]], [asked[n]])[0] == together[n]
