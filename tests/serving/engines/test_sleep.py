"""Sleep level 2: the answers after it are those before it.

On a GPU vLLM makes the state of slots in memory that level 2 gives up, and saves and restores the
model's buffers (`vllm.v1.worker.gpu_worker`). A CPU gives up nothing, so zeros are written here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_SDAR
from tests.support.engine import Engine, engine, greedy
from tests.support.families import FUSED
from tests.support.reference_llada22 import random_checkpoint22

pytestmark = pytest.mark.engine

PROMPTS = [[(7 * i + n) % 200 for i in range(9 + 5 * n)] for n in range(3)]
LLADA22 = Path("LLaDA2.2")
CASES: dict[str, tuple[Path, int, dict[str, Any]]] = {
    "DiffusionGemma": (TINY_GEMMA, 32, TEXT_ONLY_OPTIONS),
    "LLaDA2.2": (LLADA22, 8, {}),
    "SDAR, two blocks": (TINY_SDAR, 4, FUSED),
}
OTHERS = ("vllm", "torch", "transformers")


def held_by(owner: Any) -> Iterator[torch.Tensor]:
    """Every tensor that objects of this package hold below `owner`, in closures, too."""
    left, seen = [owner], set()
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or ()]
        elif type(each).__module__.partition(".")[0] not in OTHERS:
            left += gc.get_referents(each)


def made_while_loading(running: Engine) -> list[torch.Tensor]:
    """The tensors beside weights that an engine has which has not made a step yet."""
    state = running.runner.model_state
    weights = {tensor.data_ptr() for tensor in state.model.parameters()}
    own = [state, *(vars(module) for module in state.model.modules() if is_ours(module))]
    found = [tensor for each in own for tensor in held_by(each)]
    # What is made in a step lies elsewhere.
    return [one for one in found if one.data_ptr() not in weights and not one.is_inference()]


def sleep_and_wake_up(running: Engine, lost: list[torch.Tensor]) -> None:
    """What level 2 does to tensors, but for the weights, which a trainer sends again."""
    model = running.runner.model_state.model
    saved = {name: tensor.clone() for name, tensor in model.named_buffers()}
    for tensor in lost:
        tensor.zero_()
    for name, tensor in model.named_buffers():
        tensor.data.copy_(saved[name])


def is_ours(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("vllm_dllm")


def answers(running: Engine) -> list[tuple[list[int], str]]:
    asked = [greedy(70), greedy(24, ignore_eos=True), greedy(20, stop_token_ids=[5])]
    return running.generate(PROMPTS, asked)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(case: str, tmp_path: Path) -> None:
    model, block, options = CASES[case]
    if model == LLADA22:
        random_checkpoint22(model := tmp_path, block)
    with engine(model, block, **options) as running:
        lost = made_while_loading(running)
        assert len(lost) > 20
        before = answers(running)
        sleep_and_wake_up(running, lost)
        running.llm.reset_prefix_cache()
        assert answers(running) == before
        stored = running.runner.model.state_dict()
        assert not any("dllm" in name for name in stored), "the state is no part of a checkpoint"
