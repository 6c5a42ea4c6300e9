"""DiffusionGemma: token for token what transformers' class generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Engine, engine
from tests.reference_gemma import COLD, VOCABULARY, Reference, random_checkpoint

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


@pytest.fixture(scope="module", params=WINDOWS)
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


def test_the_rules_differ_where_they_should(model: Path) -> None:
    """Otherwise the two tests above would prove nothing."""
    prompt = prompts(4)[-1]
    rules = [
        Reference(model, window).generate(prompt, 3, 1, max_denoising_steps=4, **COLD)
        for window in ("symmetric", "reference")
    ]
    assert (rules[0] == rules[1]) == ("unreached" in str(model))
