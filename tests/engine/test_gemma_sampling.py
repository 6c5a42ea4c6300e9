"""DiffusionGemma at real temperatures: the reference's distribution, and seeds that hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler

from examples.tiny.tasks import Problem
from examples.tiny.tokens import gemma_processor
from examples.tiny.training import Encoder
from tests.engine.harness import Engine, engine
from tests.ops.test_noise import limit
from tests.reference_gemma import Reference
from vllm_dllm.decoding import EntropyBound

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TINY = (
    Path(__file__).resolve().parents[2]
    / "examples"
    / "tiny"
    / "checkpoints"
    / "tiny-diffusiongemma"
)
CANVAS = 32
SEEDS = 2000
ENGINE: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}, "max_num_seqs": 64}
REJECTED = 272  # stands for a position that was not accepted


def encode(prompt: str) -> list[int]:
    return Encoder(gemma_processor().tokenizer)(Problem("", prompt, "")).prompt


def params(seed: int | None, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": CANVAS} | options))


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine(TINY, CANVAS, **ENGINE) as started:
        yield started


class FirstSteps:
    """What EntropyBound saw and did in the first step of each canvas."""

    def __init__(self, running: Engine) -> None:
        self.accepted: list[torch.Tensor] = []
        self.entropy: list[torch.Tensor] = []
        self.steps: list[torch.Tensor] = []
        self.sampler, self.slots = running.runner.sampler, running.slots
        self.original = type(self.sampler)._step
        self.sampler._step = self._recorded

    def _recorded(self, canvas: Any, rows: Any, slot: torch.Tensor, present: Any) -> Any:
        from vllm_dllm.engine.requests import Phase

        first = (self.slots.step[slot] == 0) & (self.slots.phase[slot] == Phase.DENOISE)
        commits = self.slots.phase[slot] == Phase.COMMIT
        self.steps.append(self.slots.step[slot][commits])
        bound = self.slots.parameters["entropy_bound"][slot]
        accept = EntropyBound._accept(rows.statistics.entropy, bound)
        tokens = torch.where(accept, rows.statistics.sample, REJECTED)
        self.accepted.append(tokens[first])
        self.entropy.append(rows.statistics.entropy[first].mean(1))
        return self.original(self.sampler, canvas, rows, slot, present)

    def close(self) -> tuple[torch.Tensor, float, float]:
        del self.sampler._step
        steps = torch.cat(self.steps).float().mean()
        return torch.cat(self.accepted), float(torch.cat(self.entropy).mean()), float(steps)


def of_the_reference(prompt: list[int]) -> tuple[torch.Tensor, float, float]:
    """The same of transformers' class, in batches of one prompt."""
    reference = Reference(TINY)
    accepted: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    accept_canvas = EntropyBoundSampler.accept_canvas

    def recorded(self: Any, current: Any, denoiser: Any, logits: Any, cur_step: Any) -> Any:
        result = accept_canvas(self, current, denoiser, logits, cur_step)
        if int(cur_step) == reference.model.generation_config.max_denoising_steps:
            accepted.append(torch.where(self.accepted_token_mask, denoiser, REJECTED))
            entropies.append(torch.distributions.Categorical(logits=logits).entropy().mean(1))
        return result

    EntropyBoundSampler.accept_canvas = recorded
    steps = []
    try:
        torch.manual_seed(0)
        for _ in range(SEEDS // 250):
            ids = torch.tensor([prompt] * 250)
            out = reference.model.generate(ids, max_new_tokens=CANVAS, pad_token_id=-1)
            steps.append(CANVAS / out.tokens_per_forward)
    finally:
        EntropyBoundSampler.accept_canvas = accept_canvas
    mean_steps = float(torch.cat(steps).mean())
    return torch.cat(accepted), float(torch.cat(entropies).mean()), mean_steps


def two_sample(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    """Chi-square of two samples over values seen at least 20 times; the rest is one bin."""
    counts = torch.stack([torch.bincount(x, minlength=REJECTED + 1) for x in (a, b)]).double()
    common = counts.sum(0) >= 20
    bins = torch.cat([counts[:, common], counts[:, ~common].sum(1, keepdim=True)], 1)
    bins = bins[:, bins.sum(0) > 0]
    expected = bins.sum(0) / 2
    return float(((bins - expected) ** 2 / expected).sum()), bins.shape[1]


def test_the_distribution_is_the_references(running: Engine) -> None:
    """First accepted canvas, mean entropy and steps, over 2,000 seeds."""
    prompt = encode("sort 61 35 88 14")
    recorder = FirstSteps(running)
    running.generate([prompt] * SEEDS, [params(seed) for seed in range(SEEDS)])
    ours, our_entropy, our_steps = recorder.close()
    theirs, entropy, steps = of_the_reference(prompt)
    assert ours.shape == theirs.shape == (SEEDS, CANVAS)
    busiest = (theirs != REJECTED).sum(0).topk(6).indices
    for position in busiest.tolist():
        statistic, bins = two_sample(ours[:, position], theirs[:, position])
        if bins > 1:
            assert statistic < limit(bins) + 6, (position, statistic, bins)
    assert our_entropy == pytest.approx(entropy, rel=0.02)
    assert our_steps == pytest.approx(steps, rel=0.02)


ASKED = ("sort 61 35 88 14", "647 + 285", "copy abcdefghij0123456789klmnopqrst", "(7-2)*8")


def test_a_seed_is_an_answer_whatever_shares_the_batch(running: Engine) -> None:
    """Also with prompts cached, and in a batch that is otherwise different each time."""
    prompts = [encode(text) for text in ASKED]
    hot = {"temperature": 2.0, "max_tokens": 64, "ignore_eos": True}
    alone = [
        running.generate([prompt], [params(seed, **hot)])[0][0]
        for seed, prompt in enumerate(prompts)
    ]
    crowd = [encode(f"{n} + {n * n}") for n in range(20)]
    together = running.generate(
        crowd + prompts,
        [params(None, **hot) for _ in crowd] + [params(n, **hot) for n in range(len(prompts))],
    )
    assert [tokens for tokens, _ in together[len(crowd) :]] == alone
    other = running.generate(prompts[:1], [params(99, **hot)])[0][0]
    assert other != alone[0], "a seed changes nothing"


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 40, "max_num_seqs": 4},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 5, "kv_cache_memory_bytes": None, "max_model_len": 128},
    ],
    ids=["no-cache", "little-budget", "async", "preemption"],
)
def test_a_seed_is_an_answer_however_it_is_scheduled(
    running: Engine, options: dict[str, Any]
) -> None:
    """One request prefills, one denoises, one commits: each gives what it gives alone."""
    prompts = [encode(text) for text in ASKED]
    chosen = [params(n, max_tokens=64, ignore_eos=True) for n in range(len(prompts))]
    wanted = [
        running.generate([prompt], [one])[0][0] for prompt, one in zip(prompts, chosen, strict=True)
    ]
    with engine(TINY, CANVAS, **(ENGINE | options)) as other:
        assert [tokens for tokens, _ in other.generate(prompts, chosen)] == wanted
        other.assert_idle()


def test_an_offline_default_is_the_published_schedule(running: Engine) -> None:
    params_ = running.llm.get_default_sampling_params()
    assert params_.temperature == 1.0
    params_.max_tokens, params_.seed = CANVAS, 5
    prompt = encode("647 + 285")
    assert running.generate([prompt], [params_]) == running.generate([prompt], [params(5)])
