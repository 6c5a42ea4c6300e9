"""DiffusionGemma at real temperatures: the reference's distribution, and seeds that hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler

from examples.tiny.tasks import Problem, held_out_set
from examples.tiny.tokens import gemma_processor
from examples.tiny.training import Encoder
from tests.support.checkpoints import TINY_GEMMA
from tests.support.engine import Engine, count_calls, engine
from tests.support.ops.chi_square import limit
from tests.support.reference_gemma import COLD, Reference
from vllm_dllm.decoding.entropy_bound import within_bound

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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
    with engine(TINY_GEMMA, CANVAS, **ENGINE) as started:
        yield started


class FirstSteps:
    """What EntropyBound saw and did in the first step of each canvas."""

    def __init__(self, running: Engine) -> None:
        self.accepted: list[torch.Tensor] = []
        self.entropy: list[torch.Tensor] = []
        self.steps: list[torch.Tensor] = []
        self.decoder = running.runner.sampler.canvas_update
        self.decide = self.decoder.decide
        self.decoder.decide = self._recorded

    def _recorded(self, plan: Any, now: Any, rows: Any, *rest: Any) -> Any:
        (group,), step = plan.batches, now.step
        accept = within_bound(rows.statistics.entropy, group.parameters()["entropy_bound"])
        tokens = torch.where(accept, rows.statistics.sample, REJECTED)
        self.accepted.append(tokens[step == 0])
        self.entropy.append(rows.statistics.entropy[step == 0].mean(1))
        outcome = self.decide(plan, now, rows, *rest)
        # Each request is one canvas, which leaves without a commit.
        self.steps.append(step[outcome.leaves] + 1)
        return outcome

    def close(self) -> tuple[torch.Tensor, float, float]:
        del self.decoder.decide
        steps = torch.cat(self.steps).float().mean()
        return torch.cat(self.accepted), float(torch.cat(self.entropy).mean()), float(steps)


def of_the_reference(prompt: list[int]) -> tuple[torch.Tensor, float, float]:
    """The same of transformers' class, in batches of one prompt."""
    reference = Reference(TINY_GEMMA)
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
    # The class reports steps as tokens per step; without an end all of a canvas counts.
    reference.model.generation_config.eos_token_id = None
    reference.model.generation_config.pad_token_id = None
    steps = []
    try:
        torch.manual_seed(0)
        for _ in range(SEEDS // 250):
            ids = torch.tensor([prompt] * 250)
            out = reference.model.generate(ids, max_new_tokens=CANVAS)
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


@pytest.mark.long
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


def test_greedy_equals_the_reference_on_held_out_prompts(running: Engine) -> None:
    reference = Reference(TINY_GEMMA)
    encoder = Encoder(gemma_processor().tokenizer)
    asked = [encoder(problem).prompt for problem in held_out_set(8)][:50]
    wanted = [reference.generate(prompt, n, canvases=1, **COLD) for n, prompt in enumerate(asked)]
    cold = [params(n, temperature=0, ignore_eos=True) for n in range(len(asked))]
    got = [tokens for tokens, _ in running.generate(asked, cold)]
    assert len(wanted) == 50
    assert [n for n in range(50) if got[n] != wanted[n]] == []


ASKED = ("sort 61 35 88 14", "47 + 28", "copy abcdefghij0123456789klmnopqrst", "(7-2)*8")
Answers = list[list[int]]


def hot(seed: int | None, max_tokens: int = 64) -> Any:
    """Hot and without an end, so that answers of different seeds differ."""
    return params(seed, temperature=2.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(running: Engine) -> Answers:
    """What each request gives alone in the default engine."""
    return [running.generate([encode(text)], [hot(seed)])[0][0] for seed, text in enumerate(ASKED)]


def test_a_seed_is_an_answer_whatever_shares_the_batch(running: Engine, alone: Answers) -> None:
    """This also holds although the prompts are in the prefix cache by now."""
    crowd = [f"{n} + {n * n}" for n in range(20)]
    together = running.generate(
        [encode(text) for text in (*crowd, *ASKED)],
        [hot(None) for _ in crowd] + [hot(seed) for seed in range(len(ASKED))],
    )
    assert [tokens for tokens, _ in together[len(crowd) :]] == alone
    # A trained model is sure of its answers; where there is none, seeds differ.
    too_long = encode("sort 99 12 87 45 63 21 78 34 56 90 11 22")
    guesses = [running.generate([too_long], [hot(seed)])[0][0] for seed in range(6)]
    assert len({tuple(tokens) for tokens in guesses}) > 1


def test_an_offline_default_is_the_published_schedule(running: Engine) -> None:
    published = running.llm.get_default_sampling_params()
    assert published.temperature == 1.0
    published.max_tokens, published.seed = CANVAS, 5
    prompt = encode("47 + 28")
    assert running.generate([prompt], [published]) == running.generate([prompt], [params(5)])


def test_biases_and_bans(running: Engine) -> None:
    """What shapes whole rows does so for a model of uniform noise, too."""
    prompt = encode("sort 99 12 87 45 63 21 78 34 56 90 11 22")  # too long: nothing is certain

    def ask(**options: Any) -> list[int]:
        return running.generate([prompt], [params(3, ignore_eos=True, **options)])[0][0]

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


def test_minimum_length(running: Engine) -> None:
    """An answer does not end before the minimum length, and may end after it."""
    prompt = encode("47 + 28")
    short = running.generate([prompt], [params(3)])[0][0]
    assert len(short) < 10
    longer, reason = running.generate([prompt], [params(3, min_tokens=20)])[0]
    assert len(longer) >= 20
    assert reason in ("stop", "length")


# The last tests: only one engine lives in a process, and each of these starts its own.


@pytest.fixture(scope="module")
def wanted(running: Engine, alone: Answers) -> Answers:
    running.close()
    return alone


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.long),
        pytest.param({"max_num_batched_tokens": 40, "max_num_seqs": 4}, marks=pytest.mark.long),
        pytest.param({"async_scheduling": True}, marks=pytest.mark.long),
        {"num_gpu_blocks_override": 19, "block_size": 32, "max_model_len": 128},
        pytest.param(
            {"additional_config": {"dllm": {"execution": "sync"}}}, marks=pytest.mark.long
        ),
        pytest.param(
            {"additional_config": {"dllm": {"skip_last_commit": False}}}, marks=pytest.mark.long
        ),
    ],
    ids=["no-cache", "little-budget", "async", "preemption", "lockstep", "last-commit"],
)
def test_a_seed_is_an_answer_however_it_is_scheduled(
    wanted: Answers, options: dict[str, Any]
) -> None:
    """One request prefills, one denoises, one commits: each gives what it gives alone."""
    with engine(TINY_GEMMA, CANVAS, **(ENGINE | options)) as other:
        preempted = count_calls(other.scheduler, "_preempt_request")
        got = other.generate(
            [encode(text) for text in ASKED], [hot(seed) for seed in range(len(ASKED))]
        )
        assert [tokens for tokens, _ in got] == wanted
        assert bool(preempted) == ("num_gpu_blocks_override" in options)
        other.assert_idle()
