"""Windows of two blocks: no pass only commits, a step is in flight, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.engines.test_golden import SMALL_POOL, each, expected, load, submit
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.reference_sdar import random_checkpoint
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.engine.two_block_window import TwoBlockWindow

ON: dict[str, Any] = {
    "async_scheduling": True,
    "additional_config": {"dllm": {"fused_commit": "on"}},
}
OFF = ON | {"additional_config": {"dllm": {"fused_commit": "off"}}}
MASK = 99


def window(context: int = 64) -> TwoBlockWindow:
    kind = CanvasKind(4, 100, MASK, aligned=True)
    return TwoBlockWindow(SlotState(3, kind, torch.device("cpu")), context)


def test_the_first_canvas_stands_alone_and_the_next_one_behind_it() -> None:
    found, slot = window(), torch.tensor([0, 2])
    for n in (0, 2):
        found.enter(n, range(10))
    canvas = torch.arange(8).view(2, 4)
    assert found.inputs(slot, canvas).tolist() == [
        [0, 1, 2, 3] + [MASK] * 4,
        [4, 5, 6, 7, *[99] * 4],
    ]
    rows = torch.arange(16.0).view(16, 1)
    every = torch.tensor([True, True]).numpy()
    assert found.canvas_rows(rows, slot, every).flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    again = found.move(slot, torch.tensor([True, False]), canvas)
    assert again.tolist() == [8, 8], "the first canvas is still to be written"
    assert found.has_block.tolist() == [True, False, False]
    following = canvas + 50
    assert found.inputs(slot, following)[0].tolist() == [0, 1, 2, 3, 50, 51, 52, 53]
    assert found.canvas_rows(rows, slot, every).flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert found.move(slot, torch.tensor([True, True]), following).tolist() == [4, 8]
    assert found.block[0].tolist() == [50, 51, 52, 53]


@pytest.mark.parametrize(("known", "behind"), [(0, 0), (3, 0), (59, 0), (60, 4), (63, 4)])
def test_masks_never_lie_behind_the_context(known: int, behind: int) -> None:
    found = window(context=64)
    found.enter(1, range(100, 100 + known))
    assert found.before_canvas(torch.tensor([1])).tolist() == [behind]
    if behind:
        assert found.block[1].tolist() == [156, 157, 158, 159]


SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "budget-64": {"max_num_batched_tokens": 64},
    "small-pool": SMALL_POOL | {"max_model_len": 256},
    "lockstep": {"additional_config": {"dllm": {"fused_commit": "on", "execution": "sync"}}},
}


QUICK = {
    ("ckpt_b_b8", "budget-64"),
    ("ckpt_b_b8", "small-pool"),
}


@pytest.mark.engine
@pytest.mark.parametrize(("name", "schedule"), each(SCHEDULES, quick=QUICK))
def test_golden_cases(name: str, schedule: str) -> None:
    golden, cases = load(name)
    cases = cases if schedule in ("plain", "small-pool") else cases[::3]
    with engine(golden.path, golden.block_size, **(ON | SCHEDULES[schedule])) as running:
        assert running.runner.model_state.parts.window is not None
        preemptions = count_calls(running.scheduler, "_preempt_request")
        for _ in range(2):  # the second time prompts come out of the cache
            assert submit(running, golden, cases) == expected(cases)
        assert (len(preemptions) >= 4) == (schedule == "small-pool")
        running.assert_idle()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("sdar"), experts=False, block=4)


def passes(running: Engine) -> list[Any]:
    """The returned list grows by the canvases' slots with each pass that holds some."""
    return count_calls(running.runner.sampler.canvas_update, "plan")


@pytest.mark.engine
@pytest.mark.parametrize(("options", "most"), [(ON, 2.0), (OFF, 3.0)], ids=["on", "off"])
def test_no_pass_only_commits(small: Path, options: dict[str, Any], most: float) -> None:
    """Two denoise steps a block; one more for a commit, and one in flight behind the last."""
    with engine(small, 4, diffusion_config=None, **options) as running:
        found = passes(running)
        params = greedy(400, ignore_eos=True, diffusion_algorithm="Sequential", diffusion_steps=2)
        ((tokens, _),) = running.generate([list(range(8))], [params])
        assert len(tokens) == 400
        blocks = len(tokens) // 4
        assert most * blocks - 1 <= len(found) <= most * blocks + 1
        running.assert_idle()


@pytest.mark.engine
def test_the_context_is_filled_to_the_last_token(small: Path) -> None:
    """From every place in the last three blocks, also where masks would lie behind the context."""
    limits = {"max_model_len": 64, "diffusion_config": None}
    prompts = [[(7 * i) % 290 for i in range(n)] for n in range(1, 64)]
    many = [greedy(1000, ignore_eos=True)] * len(prompts)
    with engine(small, 4, **(OFF | limits)) as running:
        alone = running.generate(prompts, many)
    with engine(small, 4, **(ON | limits)) as running:
        assert running.generate(prompts, many) == alone
        running.assert_idle()
    assert [len(p) + len(tokens) for p, (tokens, _) in zip(prompts, alone, strict=True)] == [
        64
    ] * 63
