"""DiffusionGemma: what transformers' class generates, token for token, and its distribution.

The first tests are of random weights, the others of the committed checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams

from examples.tiny.tasks import Problem
from examples.tiny.tokens import gemma_processor
from examples.tiny.training import Encoder
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA
from tests.support.drive import gemma
from tests.support.engine import Engine, engine
from tests.support.families import dllm
from tests.support.ops.chi_square import limit
from tests.support.reference_gemma import COLD, VOCABULARY, Reference, random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CANVAS = 32
LENGTHS = (1, 10, 40, 70, 100, 200)
WINDOWS = {"narrow": 16, "wide": 48, "unreached": 1024}
# The canvas length is left to the checkpoint.
ENGINE = TEXT_ONLY_OPTIONS | {"diffusion_config": {"max_denoising_steps": 32}}


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(12, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def cold(seed: int, canvases: int, steps: int) -> Any:
    return SamplingParams(
        temperature=0,
        seed=seed,
        max_tokens=canvases * CANVAS,
        ignore_eos=True,
        extra_args={"diffusion_max_steps": steps},
    )


@pytest.fixture(
    scope="module", params=["narrow", "wide", pytest.param("unreached", marks=pytest.mark.long)]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    random_checkpoint(path, seed=1, canvas=CANVAS, sliding_window=WINDOWS[request.param])
    return path


@pytest.mark.parametrize("window", ["symmetric", "reference"])
def test_equals_the_reference(model: Path, window: str) -> None:
    """One to three canvases behind every prompt, in one batch and alone, in 1 and 4 steps."""
    reference, options = Reference(model, window), ENGINE | dllm(window=window)
    with engine(model, CANVAS, **options) as served:
        for steps in (1, 4):
            asked = prompts(steps)
            wanted = [
                reference.generate(one, n, 1 + n % 3, max_denoising_steps=steps, **COLD)
                for n, one in enumerate(asked)
            ]
            params = [cold(n, 1 + n % 3, steps) for n in range(len(asked))]
            assert [tokens for tokens, _ in served.generate(asked, params)] == wanted
            alone = [served.generate([p], [q])[0][0] for p, q in zip(asked, params, strict=True)]
            assert alone == wanted
        served.assert_idle()


@pytest.fixture(scope="module")
def trained() -> Iterator[Engine]:
    with engine(TINY_GEMMA, CANVAS, max_num_seqs=64, **TEXT_ONLY_OPTIONS) as started:
        yield started


def unseeded(running: Engine, prompt: list[int], **options: Any) -> list[list[int]]:
    params = SamplingParams(
        **({"temperature": 0, "max_tokens": 2 * CANVAS, "ignore_eos": True} | options),
        extra_args={"diffusion_max_steps": 2},
    )
    (output,) = running.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return [list(answer.token_ids) for answer in output.outputs]


def test_greedy_repeats_without_a_seed(tmp_path: Path) -> None:
    """A canvas begins with random tokens; those of greedy requests depend on the prompt only."""
    first, second, *_ = prompts(5)[1:]
    with gemma(tmp_path / "model").start() as running:
        (answer,) = unseeded(running, first)
        assert unseeded(running, first) == [answer]
        assert unseeded(running, second) != [answer]
        warm = unseeded(running, first, temperature=1.0, n=2)
        assert warm[0] != warm[1]
        assert unseeded(running, first, temperature=1.0, n=2) != warm


def test_the_seed_of_a_greedy_request_that_comes_back(trained: Engine) -> None:
    """Its output is part of its prompt when it comes back, and must not change its seed."""

    def seed(name: str, output: list[int], temperature: float) -> int:
        data = SimpleNamespace(
            req_id=name,
            prompt_token_ids=[20, 21],
            prefill_token_ids=[20, 21, *output],
            sampling_params=SamplingParams(temperature=temperature),
        )
        return trained.runner.model_state._default_seed(data)

    assert seed("a", [], 0) == seed("a", [30], 0) == seed("b", [], 0)
    assert seed("a", [], 0.5) == seed("a", [30], 0.5) != seed("b", [], 0.5)


def test_beam_search_is_refused(trained: Engine) -> None:
    """Beam search extends a text token by token, and a canvas is not decided in that order."""
    with pytest.raises(VLLMValidationError, match="beam_search"):
        trained.llm.beam_search(
            [{"prompt_token_ids": [20, 21]}], BeamSearchParams(beam_width=2, max_tokens=4)
        )


# ---- The committed checkpoint at real temperatures


SEEDS = 2000
TOO_LONG = "sort 99 12 87 45 63 21 78 34 56 90 11 22"  # for the model: nothing is certain


def encode(prompt: str) -> list[int]:
    return Encoder(gemma_processor().tokenizer)(Problem("", prompt, "")).prompt


def params(seed: int | None, **options: Any) -> Any:
    return SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": CANVAS} | options))


def two_sample(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    """Chi-square of two samples over values seen at least 20 times; the rest is one bin."""
    counts = torch.stack([torch.bincount(x, minlength=VOCABULARY) for x in (a, b)]).double()
    common = counts.sum(0) >= 20
    bins = torch.cat([counts[:, common], counts[:, ~common].sum(1, keepdim=True)], 1)
    bins = bins[:, bins.sum(0) > 0]
    expected = bins.sum(0) / 2
    return float(((bins - expected) ** 2 / expected).sum()), bins.shape[1]


@pytest.mark.long
def test_the_distribution_is_the_references(trained: Engine) -> None:
    """The tokens of a canvas and the steps that it took, over 2,000 seeds."""
    prompt, reference = encode(TOO_LONG), Reference(TINY_GEMMA).model
    traced = {"diffusion_trace": True}
    asked = [params(seed, ignore_eos=True, extra_args=traced) for seed in range(SEEDS)]
    given = [{"prompt_token_ids": prompt}] * SEEDS
    answers = [o.outputs[0] for o in trained.llm.generate(given, asked, use_tqdm=False)]
    ours = torch.tensor([list(one.token_ids) for one in answers])
    our_steps = [len(one.diffusion_trace.blocks[0].passes) for one in answers]
    # The class reports steps as tokens per step; without an end all of a canvas counts.
    reference.generation_config.eos_token_id = reference.generation_config.pad_token_id = None
    torch.manual_seed(0)
    batches = [
        reference.generate(torch.tensor([prompt] * 250), max_new_tokens=CANVAS)
        for _ in range(SEEDS // 250)
    ]
    theirs = torch.cat([out.sequences[:, len(prompt) :] for out in batches])
    steps = torch.cat([CANVAS / out.tokens_per_forward for out in batches])
    assert ours.shape == theirs.shape == (SEEDS, CANVAS)
    compared = 0
    for position in range(CANVAS):
        statistic, bins = two_sample(ours[:, position], theirs[:, position])
        if bins > 1:
            assert statistic < limit(bins) + 6, (position, statistic, bins)
            compared += 1
    assert compared > 6, "positions whose token is not certain"
    assert sum(our_steps) / SEEDS == pytest.approx(float(steps.mean()), rel=0.02)


def test_biases_and_bans(trained: Engine) -> None:
    """What shapes whole rows does so for a model of uniform noise, too."""
    prompt = encode(TOO_LONG)

    def ask(**options: Any) -> list[int]:
        return trained.generate([prompt], [params(3, ignore_eos=True, **options)])[0][0]

    plain = ask()
    likely = max(set(plain), key=plain.count)
    assert set(ask(allowed_token_ids=plain[:3])) <= set(plain[:3])
    assert likely not in ask(logit_bias={likely: -100.0})
    word = gemma_processor().tokenizer.decode([plain[0]])
    assert plain[0] not in ask(bad_words=[word])
    assert ask(min_p=1.0) == ask(top_k=1)
    assert ask(repetition_penalty=1.8) != plain
    twice = ask(max_tokens=2 * CANVAS)
    assert ask(max_tokens=2 * CANVAS, frequency_penalty=2.0)[:CANVAS] == twice[:CANVAS], (
        "nothing stands before the first canvas"
    )
    short, longer = trained.generate([encode("47 + 28")] * 2, [params(3), params(3, min_tokens=20)])
    assert len(short[0]) < 10 and len(longer[0]) >= 20


def test_canvases_of_one_step_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = gemma(tmp_path / "model")
    prompts = family.prompts((3, 20, 33), seed=4)
    one = [family.params(2 * family.length, "quick", ignore_eos=True) for _ in prompts]
    slow = family.params(2 * family.length, "slow", ignore_eos=True)
    with family.start() as running:
        readout = running.runner.model_state.readout
        read, computed = readout.read, []

        def watched(*args: Any) -> Any:
            readings = read(*args)
            computed.append(readings.soft_embedding is not None)
            return readings

        monkeypatch.setattr(readout, "read", watched)
        alone = running.generate(prompts, one)
        assert computed
        assert not any(computed)
        computed.clear()
        (wanted,) = running.generate(prompts[2:], [slow])
        assert all(computed), "canvases that are denoised again read their prediction"
        mixed = running.generate(prompts, [*one[:2], slow])
        assert mixed == [*alone[:2], wanted]
