"""DiffusionGemma: token for token what transformers' class generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine import Engine, engine
from tests.support.reference_gemma import COLD, VOCABULARY, Reference, random_checkpoint

pytestmark = pytest.mark.engine

CANVAS = 32
LENGTHS = (1, 10, 40, 70, 100, 200)
WINDOWS = {"narrow": 16, "wide": 48, "unreached": 1024}
ENGINE = {
    "limit_mm_per_prompt": {"image": 0, "video": 0},
    # The canvas length is left to the checkpoint.
    "diffusion_config": {"max_denoising_steps": 32},
}


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(12, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def cold(seed: int, canvases: int, steps: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        seed=seed,
        max_tokens=canvases * CANVAS,
        ignore_eos=True,
        extra_args={"diffusion_max_steps": steps},
    )


@pytest.fixture(
    scope="module",
    params=["narrow", "wide", pytest.param("unreached", marks=pytest.mark.long)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    random_checkpoint(path, seed=1, canvas=CANVAS, sliding_window=WINDOWS[request.param])
    return path


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Engine]:
    with engine(model, CANVAS, **ENGINE) as started:
        yield started


def assert_equal(model: Path, running: Engine, window: str, steps: int) -> None:
    """One to three canvases behind every prompt, in one batch and alone."""
    reference = Reference(model, window)
    asked = prompts(steps)
    wanted = [
        reference.generate(prompt, seed=n, canvases=1 + n % 3, max_denoising_steps=steps, **COLD)
        for n, prompt in enumerate(asked)
    ]
    params = [cold(n, 1 + n % 3, steps) for n in range(len(asked))]
    together = [tokens for tokens, _ in running.generate(asked, params)]
    assert together == wanted
    alone = [
        running.generate([prompt], [one])[0][0] for prompt, one in zip(asked, params, strict=True)
    ]
    assert alone == wanted
    running.assert_idle()


@pytest.mark.parametrize("steps", [1, 4])
def test_symmetric_window_equals_the_reference(model: Path, running: Engine, steps: int) -> None:
    assert_equal(model, running, "symmetric", steps)


@pytest.fixture(scope="module")
def running_reference(model: Path) -> Iterator[Engine]:
    settings = {"additional_config": {"dllm": {"window": "reference"}}}
    with engine(model, CANVAS, **ENGINE, **settings) as started:
        yield started


@pytest.mark.parametrize("steps", [1, 4])
def test_reference_window_equals_the_reference(
    model: Path, running_reference: Engine, steps: int
) -> None:
    assert_equal(model, running_reference, "reference", steps)


def unseeded(running: Engine, prompt: list[int], **options: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(
        **({"temperature": 0, "max_tokens": 2 * CANVAS, "ignore_eos": True} | options),
        extra_args={"diffusion_max_steps": 2},
    )
    (output,) = running.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return [list(answer.token_ids) for answer in output.outputs]


def test_greedy_repeats_without_a_seed(running: Engine) -> None:
    """A canvas begins with random tokens; those of greedy requests depend on the prompt only."""
    first, second, *_ = prompts(5)[1:]
    (answer,) = unseeded(running, first)
    assert unseeded(running, first) == [answer]
    assert unseeded(running, second) != [answer]
    warm = unseeded(running, first, temperature=1.0, n=2)
    assert warm[0] != warm[1]
    assert unseeded(running, first, temperature=1.0, n=2) != warm


def test_the_seed_of_a_greedy_request_that_comes_back(running: Engine) -> None:
    """Its output is part of its prompt when it comes back, and must not change its seed."""
    from vllm import SamplingParams

    def seed(name: str, output: list[int], temperature: float) -> int:
        data = SimpleNamespace(
            req_id=name,
            prompt_token_ids=[20, 21],
            prefill_token_ids=[20, 21, *output],
            sampling_params=SamplingParams(temperature=temperature),
        )
        return running.runner.model_state._default_seed(data)

    assert seed("a", [], 0) == seed("a", [30], 0) == seed("b", [], 0)
    assert seed("a", [], 0.5) == seed("a", [30], 0.5) != seed("b", [], 0.5)


def test_beam_search_is_refused(running: Engine) -> None:
    """Beam search extends a text token by token, and a canvas is not decided in that order."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    with pytest.raises(VLLMValidationError, match="beam_search"):
        running.llm.beam_search(
            [{"prompt_token_ids": [20, 21]}], BeamSearchParams(beam_width=2, max_tokens=4)
        )
