"""Several passes in a step give the answers of one pass in a step, in as many passes.

All other tests of engines on a CPU take several, too, because that is the default there.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference_fast_dllm, reference_nemotron, reference_openpangu
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.families import CONTEXT, dllm, prompt
from tests.support.mixed_requests import FAMILIES, completions, mixed
from vllm_dllm.engine.further_passes import FurtherPasses

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ONE = dllm(passes_per_step=1)


def counted(running: Engine, asked: list[Any]) -> tuple[list[Any], dict[Any, int], int]:
    """The answers, the passes by algorithm and kind, and in how many steps."""
    running.scheduler.counts.clear()
    # A process that finds the next part of a constraint lets canvases wait for as long as it takes.
    running.runner.model_state.parts.constraints._explorer = None
    steps = count_calls(running.runner, "sample_tokens")
    answers = [
        [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in outputs]
        for outputs in completions(running, asked, {})
    ]
    running.assert_idle()
    return answers, dict(running.scheduler.counts), len(steps)


@pytest.fixture
def at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many passes a step takes is drawn, whatever pays."""
    chance = random.Random(8)
    monkeypatch.setattr(FurtherPasses, "follows", lambda *_: chance.random() < 0.7)


@pytest.mark.parametrize(
    ("family", "ahead"),
    [("llada2", False), ("llada2", True), ("sdar", True), ("gemma", False)],
)
@pytest.mark.usefixtures("at_random")
def test_any_number_of_passes(family: str, ahead: bool) -> None:
    """Greedy, drawn, constrained, streamed and reported requests, preempted now and then."""
    path, block, _, _ = FAMILIES[family]
    options: dict[str, Any] = {"num_gpu_blocks_override": 40, "async_scheduling": ahead}
    options |= TEXT_ONLY_OPTIONS if family == "gemma" else {}
    asked = list(mixed(family, 32))
    with engine(path, block, **options, **ONE) as running:
        assert running.runner.sampler.further is None
        wanted, passes, steps = counted(running, asked)
    with engine(path, block, **options) as running:
        for _ in range(2):
            found, passes_again, fewer = counted(running, asked)
            assert found == wanted
            assert passes_again == passes
            assert fewer < 0.9 * steps


@pytest.mark.parametrize(
    "module",
    [reference_nemotron, reference_fast_dllm, reference_openpangu],
    ids=["verifying", "shifted", "both"],
)
@pytest.mark.usefixtures("at_random")
def test_anchored_and_shifted_families(module: Any, tmp_path: Path) -> None:
    """Causal commits, of which those of LinearSpec verify, and rows that are read one before."""
    module.random_checkpoint(tmp_path, 8)
    rule = {"diffusion_algorithm": "LinearSpec"} if module is reference_nemotron else {}
    prompts = [prompt(n, length) for n, length in enumerate((1, 7, 16, 33, 50, 64))]
    params = [greedy(30 + n, ignore_eos=True, **(rule if n % 2 else {})) for n in range(6)]
    own = {"diffusion_config": None, "max_model_len": CONTEXT}
    with engine(tmp_path, 8, **own, **ONE) as running:
        wanted = running.generate(prompts, params)
        steps = count_calls(running.runner, "sample_tokens")
        assert running.generate(prompts, params) == wanted
    with engine(tmp_path, 8, **own) as running:
        fewer = count_calls(running.runner, "sample_tokens")
        assert running.generate(prompts, params) == wanted
        assert len(fewer) < 0.8 * len(steps)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dllm(passes_per_step=4, execution="sync"), "leave together"),
        (
            {"async_scheduling": True} | dllm(passes_per_step=4, fused_commit="on"),
            "reads two blocks",
        ),
    ],
)
def test_impossible_combinations_are_refused(options: dict[str, Any], reason: str) -> None:
    path, block, _, _ = FAMILIES["sdar"]
    why = f"dllm.passes_per_step=4: impossible, because .*{reason}"
    with pytest.raises(ValueError, match=why), engine(path, block, **options):
        pass
