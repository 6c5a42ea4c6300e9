"""Sampling parameters: each does what it says, alone and in a crowd, however it is scheduled.

DiffusionGemma's distribution is compared with `transformers`' in `test_gemma.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support import drive, reference_llada2
from tests.support.engine import Engine, count_calls, engine
from tests.support.families import FAMILIES
from tests.support.long import long_but
from tests.support.ops.chi_square import limit
from tests.support.reference_vision import Size, picture
from vllm_dllm.decoding.base import DrawConfidence

pytestmark = pytest.mark.engine

VOCABULARY, BLOCK, SEEDS = 300, 16, 1000
PROMPT = list(range(20, 20 + 2 * BLOCK))
of_llada2 = pytest.mark.parametrize("model", ["llada2"], indirect=True)
# Models whose every prompt begins with a picture, as long as some blocks are.
PICTURED: dict[str, Size] = {"sdar-vl": (1, 76, 20), "nemotron-vlm": (1, 32, 116)}
# Every position is decided in the first step, so that positions are independent draws.
ONE_STEP = {"diffusion_max_steps": 1}


@dataclass(frozen=True)
class Model:
    """A masked model of random weights.

    Attributes:
        rows: the reference's logits ``[new, vocabulary]`` of the masks in the first canvas after a
            text, without that of the mask token.
        draw_confidence: see `Family.draw_confidence`.
        shown: what every text begins with, as the model reads it.
        pictures: what a prompt says of them, beside its tokens.
    """

    running: Engine
    mask: int
    rows: Callable[[list[int]], torch.Tensor]
    draw_confidence: DrawConfidence | None
    shown: list[int]
    placeholders: list[int]
    pictures: dict[str, Any]

    def prompt(self, text: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": self.placeholders + text, **self.pictures}


@pytest.fixture(
    scope="module",
    params=[
        "llada2",
        pytest.param("nemotron", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("dream", *PICTURED)),
    ],
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    name, path = request.param, tmp_path_factory.mktemp(request.param) / "model"
    shown, placeholders, pictures = list[int](), list[int](), dict[str, Any]()
    if name == "llada2":
        mask = VOCABULARY - 1
        reference_llada2.random_checkpoint(path, 3, vocab_size=VOCABULARY, mask_token_id=mask)
        reference: Any = reference_llada2.Reference.load(path, BLOCK, mask)
    else:
        FAMILIES[name].make(path, BLOCK)
        reference = FAMILIES[name].reference(path)
        mask = reference.mask
    if name in PICTURED:
        size, placeholders = PICTURED[name], [reference.placeholder]
        pictures = {"multi_modal_data": {"image": picture(*size)}}
        shown = reference.shown(placeholders, [size])
        assert len(shown) % BLOCK == 0, "tests count blocks from the start of their text"

    def rows(text: list[int]) -> torch.Tensor:
        new = BLOCK - (len(text) % BLOCK if reference.aligned else 0)
        known = shown + text
        begin = () if reference.aligned else (len(known),)
        with torch.no_grad():
            logits = reference.logits(known + [mask] * new, *begin)[len(known) :].float().clone()
        logits[:, mask] = -torch.inf
        return logits

    with engine(path, BLOCK, max_num_seqs=64, max_num_batched_tokens=1024) as running:
        draw_confidence = running.runner.model_state.family.draw_confidence
        yield Model(running, mask, rows, draw_confidence, shown, placeholders, pictures)


def params(**options: Any) -> SamplingParams:
    extra = {name: options.pop(name) for name in list(options) if name.startswith("diffusion_")}
    defaults = {"temperature": 1.0, "seed": 1, "max_tokens": 24, "ignore_eos": True}
    return SamplingParams(**(defaults | options), extra_args=extra or None)


def tokens(model: Model, *asked: Any) -> list[list[int]]:
    prompts = [model.prompt(PROMPT)] * len(asked)
    return [found for found, _ in model.running.generate(prompts, asked)]


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
    "filters": {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "allowed": {"temperature": 1.5, "allowed_token_ids": [30, 40, 50, 60]},
    "bias": {"temperature": 1.0, "logit_bias": {77: 9.0, 78: -3.0}},
}


def expected(logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The distribution that the options ask for, step by step."""
    if "allowed_token_ids" in options:
        keep = torch.tensor(options["allowed_token_ids"])
        logits = torch.full_like(logits, -torch.inf).index_copy_(0, keep, logits[keep])
    for token, bias in options.get("logit_bias", {}).items():
        logits[token] += bias
    p = (logits / options["temperature"]).softmax(-1)
    p = torch.where(p >= options.get("min_p", 0) * p.max(), p, 0.0)
    order = p.argsort(descending=True)
    if "top_k" in options:
        p[order[options["top_k"] :]] = 0.0
    if "top_p" in options:
        p /= p.sum()
        before = p[order].cumsum(0) - p[order]
        p[order[before >= options["top_p"]]] = 0.0
    return p / p.sum()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name: str, model: Model) -> None:
    """The first token over many seeds, against what the reference's logits say."""
    options = DISTRIBUTIONS[name]
    asked = [params(seed=n, max_tokens=1, **options, **ONE_STEP) for n in range(SEEDS)]
    drawn = [found[0] for found in tokens(model, *asked)]
    assert model.mask not in drawn
    statistic, bound = chi_square(drawn, expected(model.rows(PROMPT)[0], options))
    assert statistic < bound


def test_greedy_is_the_likeliest_token_alone(model: Model) -> None:
    """Whatever the seed. A draw as likely as the argmax is as sure, so that many pass at once."""
    sure = {"diffusion_threshold": 0.0} if model.draw_confidence == "filtered" else {}
    both = (params(temperature=0, seed=n, **sure) for n in (1, 42))
    one, other = tokens(model, *both)
    assert one == other
    assert tokens(model, params(top_k=1)) == [one]
    steps = count_calls(model.running.runner.sampler, "update")
    tokens(model, params(top_k=1, diffusion_threshold=0.01, max_tokens=BLOCK))
    assert len(steps) <= 4


def test_a_low_temperature_makes_draws_sure(model: Model) -> None:
    """A few steps decide a block, if confidence is that after the temperature."""
    steps = count_calls(model.running.runner.sampler, "update")
    tokens(model, params(temperature=1e-3, max_tokens=BLOCK))
    assert (len(steps) < BLOCK // 2) == (model.draw_confidence is not None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs(temperature: float, model: Model) -> None:
    """They are those of the deciding step, for the chosen token and the likeliest ones."""
    prompt = PROMPT[:-3]  # of LLaDA2 a tail of the prompt stands in the first canvas
    asked = params(temperature=temperature, max_tokens=BLOCK + 3, logprobs=3, seed=4, **ONE_STEP)
    (output,) = model.running.llm.generate([model.prompt(prompt)], [asked], use_tqdm=False)
    one = output.outputs[0]
    assert len(one.logprobs) == len(one.token_ids) == BLOCK + 3
    for row, token, reported in zip(
        model.rows(prompt).log_softmax(-1), one.token_ids, one.logprobs, strict=False
    ):
        wanted = {int(t): float(row[t]) for t in row.topk(3).indices} | {token: float(row[token])}
        assert set(reported) == set(wanted)
        assert max(reported.values(), key=lambda info: info.logprob).rank == 1
        for t, info in reported.items():
            assert info.logprob == pytest.approx(wanted[t], abs=2e-4)


def test_penalties(model: Model) -> None:
    """Penalties count the tokens of the prompt and of earlier canvases."""
    options = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    greedy = {"temperature": 0, "max_tokens": 2 * BLOCK} | ONE_STEP
    got, plain = tokens(model, params(**greedy, **options), params(**greedy))
    output: list[int] = []
    for _ in range(2):
        logits = model.rows(PROMPT + output)
        count = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCABULARY)
        before = model.shown + PROMPT + output
        seen = torch.bincount(torch.tensor(before), minlength=VOCABULARY) > 0
        repeated = torch.where(logits > 0, logits / 1.5, logits * 1.5)
        logits = torch.where(seen, repeated, logits) - (0.4 * count + 0.7 * (count > 0))
        output += logits.argmax(-1).tolist()
    assert got == output != plain


def test_minimum_length_bans_the_ends_until_then(model: Model) -> None:
    greedy = {"temperature": 0, "max_tokens": 20, "ignore_eos": False}
    (plain,) = tokens(model, params(**greedy))
    ends = sorted(set(plain[:4]))
    short, longer = tokens(
        model,
        params(stop_token_ids=ends, **greedy),
        params(stop_token_ids=ends, min_tokens=18, **greedy),
    )
    assert len(short) == 1
    assert len(longer) >= 18
    assert not set(longer[:17]) & set(ends)


@of_llada2
def test_bad_words(model: Model) -> None:
    """Words of one token work; longer ones are refused (tests/serving/servers/test_refusals.py)."""
    (plain,) = tokens(model, params(temperature=0))
    (got,) = tokens(model, params(temperature=0, bad_words=[f"t{token}" for token in plain[:3]]))
    assert not set(got) & set(plain[:3])


def test_several_samples(model: Model) -> None:
    prompt, asked = model.prompt(PROMPT), params(n=3, temperature=1.5)
    first, again = (
        [list(one.token_ids) for one in output.outputs]
        for output in model.running.llm.generate([prompt] * 2, [asked] * 2, use_tqdm=False)
    )
    assert len(set(map(tuple, first))) == 3
    assert again == first


@of_llada2
def test_refused_by_name(model: Model) -> None:
    for options, message in (
        ({"diffusion_algorithm": "Credit"}, "temperature=1.0 is not supported by Credit"),
        (
            {"prompt_logprobs": 1},
            "prompt_logprobs is not supported with diffusion models: a prompt",
        ),
        ({"bad_words": ["t5 t6"]}, "only words of one token"),
        ({"allowed_token_ids": [model.mask]}, "nothing but the mask token"),
    ):
        with pytest.raises(VLLMValidationError, match=re.escape(message)):
            tokens(model, params(**options))
    model.running.assert_idle()


# ---- However requests are scheduled, and whoever had their slots before

WARM = {"temperature": 0.9, "seed": 3}
OPTIONS: list[dict[str, Any]] = [
    {"logit_bias": {30: 4.0, 31: -9.0}},
    WARM | {"top_k": 5},
    {},
    {"allowed_token_ids": [40, 41, 42, 43]},
    WARM | {"top_p": 0.5, "min_p": 0.02},
    {"min_tokens": 15, "stop_token_ids": list(range(60, 90))},
    WARM | {"temperature": 1.3},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    WARM | {"logit_bias": {50: 3.0}, "top_k": 9, "repetition_penalty": 1.2, "min_tokens": 9},
]
# Three slots, which requests pass on to each other, a step ahead of the host.
SCHEDULES: dict[str, dict[str, Any]] = {
    "three slots": {"async_scheduling": True, "max_num_seqs": 3},
    "few pages": {"max_model_len": 128},
    "chunks, not cached": {"max_num_batched_tokens": 48, "enable_prefix_caching": False},
    "sync": {"additional_config": {"dllm": {"execution": "sync", "skip_last_commit": False}}},
}
PAGES = {"llada2": 10, "nemotron": 10, "gemma": 19}
QUICK = {("llada2", "three slots"), ("llada2", "few pages"), ("gemma", "few pages")}


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], drive.Family]:
    folder = tmp_path_factory.mktemp("families")

    def family_of(name: str) -> drive.Family:
        return drive.llada2() if name == "llada2" else getattr(drive, name)(folder / name)

    return family_of


def requests(family: drive.Family) -> tuple[list[list[int]], list[SamplingParams]]:
    """Of different lengths, so that slots change hands at different times."""
    prompts = family.prompts([11 + 5 * n for n in range(len(OPTIONS))], seed=6)
    asked = []
    for n, options in enumerate(OPTIONS):
        pace = family.quick if n % 3 else family.slow
        common = {"max_tokens": 20 + 7 * (n % 4), "temperature": 0.0, "seed": 8}
        asked.append(SamplingParams(**(common | options), extra_args=dict(pace)))
    return prompts, asked


@pytest.fixture(scope="module")
def alone(family_of: Callable[[str], drive.Family]) -> Callable[[str], list[tuple[list[int], str]]]:
    @cache
    def alone(name: str) -> list[tuple[list[int], str]]:
        family = family_of(name)
        with family.start() as running:
            return [running.generate([p], [q])[0] for p, q in zip(*requests(family), strict=True)]

    return alone


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), long_but(QUICK, product(PAGES, SCHEDULES)))
def test_requests_are_as_alone(
    name: str,
    schedule: str,
    family_of: Callable[[str], drive.Family],
    alone: Callable[[str], list[tuple[list[int], str]]],
) -> None:
    """In both orders, and after all are preempted at once, again and again."""
    family, wanted = family_of(name), alone(name)
    (prompts, asked), few = requests(family), schedule == "few pages"
    assert len({tuple(found) for found, _ in wanted}) == len(wanted)
    options = SCHEDULES[schedule] | ({"num_gpu_blocks_override": PAGES[name]} if few else {})
    with family.start(**options) as running:
        preempted = count_calls(running.scheduler, "_preempt_request")
        assert running.generate(prompts, asked) == wanted
        assert running.generate(prompts[::-1], asked[::-1]) == wanted[::-1]
        assert bool(preempted) == few
        driver = drive.Driver(running)
        for n, (prompt, one) in enumerate(zip(prompts, asked, strict=True)):
            driver.add(f"r{n}", prompt, one)
        for _ in range(6):
            for _ in range(5):
                driver.step()
            assert running.core.reset_prefix_cache(reset_running_requests=True)
        found = driver.finish()
        assert [found[f"r{n}"] for n in range(len(prompts))] == [answer for answer, _ in wanted]
        running.assert_idle()
