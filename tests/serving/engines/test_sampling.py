"""Sampling parameters of a masked model: each does what it says, alone and in a crowd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine import Engine, count_calls, engine
from tests.support.ops.chi_square import limit
from tests.support.reference_llada2 import Reference, random_checkpoint

pytestmark = pytest.mark.engine

VOCABULARY, BLOCK, MASK = 300, 16, 299
PROMPT = list(range(20, 20 + 2 * BLOCK))
# Every position is decided in the first step, so that positions are independent draws.
ONE_STEP = {"diffusion_algorithm": "FixedSteps", "diffusion_steps": 1}
SEEDS = 1000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "m"
    random_checkpoint(path, 3, vocab_size=VOCABULARY, mask_token_id=MASK)
    return path


@pytest.fixture(scope="module")
def running(path: Path) -> Iterator[Engine]:
    with engine(path, BLOCK, max_num_seqs=64) as started:
        yield started


def params(**options: Any) -> Any:
    from vllm import SamplingParams

    extra = {name: options.pop(name) for name in list(options) if name.startswith("diffusion_")}
    defaults = {"temperature": 1.0, "seed": 1, "max_tokens": 24, "ignore_eos": True}
    return SamplingParams(**(defaults | options), extra_args=extra or None)


def tokens(running: Engine, *asked: Any, prompt: list[int] = PROMPT) -> list[list[int]]:
    return [t for t, _ in running.generate([prompt] * len(asked), asked)]


def first_row(path: Path) -> torch.Tensor:
    """The reference's logits of the first position behind the prompt."""
    reference = Reference.load(path, BLOCK, MASK)
    with torch.no_grad():
        logits = reference.logits(PROMPT + [MASK] * BLOCK)[len(PROMPT)]
    logits[MASK] = -torch.inf
    return logits


def chi_square(drawn: list[int], expected: torch.Tensor) -> tuple[float, float]:
    """The statistic, with rare tokens as one class, and its limit."""
    rare = expected * len(drawn) < 10
    classes = torch.where(rare, 0, torch.cumsum(~rare, 0))
    merged = torch.zeros(int(classes.max()) + 1).index_add_(0, classes, expected)
    counts = torch.bincount(classes[torch.tensor(drawn)], minlength=len(merged))
    wanted = merged * len(drawn)
    assert not counts[wanted == 0].any(), "an excluded token was drawn"
    some = wanted > 0
    return float(((counts - wanted)[some] ** 2 / wanted[some]).sum()), limit(int(some.sum()))


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top-k": {"temperature": 1.5, "top_k": 5},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "allowed": {"temperature": 1.5, "allowed_token_ids": [30, 40, 50, 60]},
    "bias": {"temperature": 1.0, "logit_bias": {77: 9.0, 78: -3.0}},
}


def expected(logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The distribution that the options ask for, step by step."""
    logits = logits.clone()
    if "allowed_token_ids" in options:
        keep = torch.tensor(options["allowed_token_ids"])
        logits = torch.full_like(logits, -torch.inf).index_copy_(0, keep, logits[keep])
    for token, bias in options.get("logit_bias", {}).items():
        logits[token] += bias
    p = (logits / options["temperature"]).softmax(-1)
    order = p.argsort(descending=True)
    keep = torch.ones_like(p, dtype=torch.bool)
    if "top_k" in options:
        keep[order[options["top_k"] :]] = False
    if "top_p" in options:
        before = p[order].cumsum(0) - p[order]
        keep[order[before >= options["top_p"]]] = False
    if "min_p" in options:
        keep &= p >= options["min_p"] * p.max()
    p = torch.where(keep, p, 0.0)
    return p / p.sum()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if n == "hot" else ()) for n in DISTRIBUTIONS],
)
def test_distribution(name: str, running: Engine, path: Path) -> None:
    """The first token over many seeds, against what the reference's logits say."""
    options = DISTRIBUTIONS[name]
    asked = [params(seed=n, max_tokens=1, **options, **ONE_STEP) for n in range(SEEDS)]
    drawn = [t[0] for t in tokens(running, *asked)]
    statistic, bound = chi_square(drawn, expected(first_row(path), options))
    assert statistic < bound


def test_greedy_ignores_the_seed(running: Engine) -> None:
    one, other = tokens(running, params(temperature=0, seed=1), params(temperature=0, seed=42))
    assert one == other
    (narrow,) = tokens(running, params(temperature=1.0, top_k=1))
    assert narrow == one, "the likeliest token alone is greedy"


def test_a_drawn_token_can_be_sure(running: Engine) -> None:
    """With draws as likely as the argmax, the threshold still lets many pass at once."""
    count = count_calls(running.runner.sampler, "update")
    tokens(running, params(temperature=1.0, top_k=1, diffusion_threshold=0.01, max_tokens=BLOCK))
    assert len(count) <= 4


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"diffusion_algorithm": "JointThreshold"}])
def test_same_seed_same_output(options: dict[str, Any], running: Engine) -> None:
    mine = params(seed=5, temperature=1.3, **options)
    (alone,) = tokens(running, mine)
    crowd = [params(seed=n, temperature=0.9, top_k=9) for n in range(9)]
    together = tokens(running, *crowd[:4], mine, *crowd[4:])
    assert together[4] == alone
    assert tokens(running, params(seed=6, temperature=1.3, **options)) != [alone]


def reference_block(path: Path, context: list[int]) -> torch.Tensor:
    """The reference's logits ``[BLOCK, vocabulary]`` of a fresh canvas behind ``context``."""
    reference = Reference.load(path, BLOCK, MASK)
    with torch.no_grad():
        return reference.logits(context + [MASK] * BLOCK)[len(context) :]


def without_mask(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[:, MASK] = -torch.inf
    return logits


@pytest.mark.parametrize("options", [{}, ONE_STEP, {"temperature": 1.0, **ONE_STEP}])
def test_logprobs(options: dict[str, Any], running: Engine, path: Path) -> None:
    """They are those of the deciding step, for the chosen token and the likeliest ones."""
    from vllm import SamplingParams

    options = {"temperature": 0.0, "max_tokens": BLOCK + 3, "logprobs": 3, "seed": 4} | options
    asked = params(**options)
    assert isinstance(asked, SamplingParams)
    prompt = {"prompt_token_ids": PROMPT[:-3]}  # a tail of the prompt stands in the first canvas
    (output,) = running.llm.generate([prompt], [asked], use_tqdm=False)
    one = output.outputs[0]
    assert len(one.logprobs) == len(one.token_ids) == BLOCK + 3
    for token, reported in zip(one.token_ids, one.logprobs, strict=True):
        assert token in reported
        best = max(reported.values(), key=lambda info: info.logprob)
        assert best.rank == 1
        assert len(reported) in (3, 4)
        if options["temperature"] == 0:
            assert reported[token].rank == 1
    if "diffusion_steps" not in options:
        return
    reference = Reference.load(path, BLOCK, MASK)
    with torch.no_grad():
        rows = reference.logits(PROMPT[:-3] + [MASK] * 3)[-3:].log_softmax(-1)
    for row, token, reported in zip(rows, one.token_ids, one.logprobs, strict=False):
        wanted = {int(t): float(row[t]) for t in row.topk(3).indices} | {token: float(row[token])}
        assert set(reported) == set(wanted)
        for t, info in reported.items():
            assert info.logprob == pytest.approx(wanted[t], abs=2e-4)


def test_penalties(running: Engine, path: Path) -> None:
    """Penalties count the tokens of the prompt and of earlier canvases."""
    options = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    (got,) = tokens(running, params(temperature=0, max_tokens=2 * BLOCK, **options, **ONE_STEP))
    output: list[int] = []
    for _ in range(2):
        logits = without_mask(reference_block(path, PROMPT + output))
        count = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCABULARY)
        seen = torch.bincount(torch.tensor(PROMPT + output), minlength=VOCABULARY) > 0
        logits = torch.where(seen, torch.where(logits > 0, logits / 1.5, logits * 1.5), logits) - (
            0.4 * count + 0.7 * (count > 0)
        )
        output += logits.argmax(-1).tolist()
    assert got == output
    (plain,) = tokens(running, params(temperature=0, max_tokens=2 * BLOCK, **ONE_STEP))
    assert plain != got


def test_minimum_length_bans_the_ends_until_then(running: Engine) -> None:
    greedy = {"temperature": 0, "max_tokens": 20, "ignore_eos": False}
    (plain,) = tokens(running, params(**greedy))
    ends = sorted(set(plain[:4]))
    (short,) = tokens(running, params(stop_token_ids=ends, **greedy))
    assert len(short) == 1
    (longer,) = tokens(running, params(stop_token_ids=ends, min_tokens=18, **greedy))
    assert len(longer) >= 18
    assert not set(longer[:17]) & set(ends)


def test_bad_words(running: Engine) -> None:
    """Words of one token work; longer ones are refused (tests/serving/servers/test_refusals.py)."""
    (plain,) = tokens(running, params(temperature=0))
    words = [f"t{token}" for token in plain[:3]]
    (got,) = tokens(running, params(temperature=0, bad_words=words))
    assert not set(got) & set(plain[:3])


def test_several_samples(running: Engine) -> None:
    prompt = {"prompt_token_ids": PROMPT}
    (output,) = running.llm.generate([prompt], [params(n=3, temperature=1.5)], use_tqdm=False)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    (again,) = running.llm.generate([prompt], [params(n=3, temperature=1.5)], use_tqdm=False)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in output.outputs]


def test_refused_by_name(running: Engine) -> None:
    from vllm.exceptions import VLLMValidationError

    for options, message in (
        ({"diffusion_algorithm": "Credit"}, "temperature=1.0 is not supported by Credit"),
        ({"diffusion_algorithm": "Credits"}, "did you mean 'Credit'"),
        ({"diffusion_low": 0.5}, "diffusion_low is not a setting of LowConfidence"),
        (
            {"prompt_logprobs": 1},
            "prompt_logprobs is not supported with diffusion models: a prompt",
        ),
        ({"bad_words": ["t5 t6"]}, "only words of one token"),
        ({"allowed_token_ids": [MASK]}, "nothing but the mask token"),
    ):
        with pytest.raises(VLLMValidationError, match=re.escape(message)):
            tokens(running, params(**options))
    running.assert_idle()


SCHEDULES: dict[str, dict[str, Any]] = {
    "no-prefix-cache": {"enable_prefix_caching": False},
    "async": {"async_scheduling": True},
    "budget": {"max_num_batched_tokens": 40},
    "preempted": {"num_gpu_blocks_override": 10, "block_size": 32, "max_model_len": 128},
}


QUICK = ("async", "preempted")


def seeded() -> list[Any]:
    return [params(seed=n, temperature=1.2, max_tokens=60, top_p=0.95) for n in range(6)]


@pytest.fixture(scope="module")
def wanted(running: Engine) -> list[list[int]]:
    return tokens(running, *seeded())


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=() if s in QUICK else pytest.mark.long) for s in SCHEDULES],
)
def test_same_seed_however_scheduled(
    schedule: str, wanted: list[list[int]], running: Engine, path: Path
) -> None:
    """Last in this file: only one engine can live in a process, so the module's is closed."""
    running.close()
    with engine(path, BLOCK, **SCHEDULES[schedule]) as other:
        preemptions = count_calls(other.scheduler, "_preempt_request")
        assert tokens(other, *seeded()) == wanted
        assert bool(preemptions) == (schedule == "preempted")
