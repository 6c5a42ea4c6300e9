"""New weights in a running engine: its tokens are those of an engine that began with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_traces import FAMILIES, completions, mixed
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import Engine, engine

pytestmark = pytest.mark.engine


def changed(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a copy of a checkpoint to a folder, whose weights differ a little; and return them."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    torch.manual_seed(1)
    weights = {
        name: tensor + (0.05 * tensor.float().std() * torch.randn_like(tensor.float())).to(tensor)
        if tensor.is_floating_point() and tensor.numel() > 1
        else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return weights


def answers(running: Engine, asked: list[Any]) -> list[list[list[int]]]:
    return [[list(o.token_ids) for o in outputs] for outputs in completions(running, asked, {})]


@pytest.mark.parametrize(
    "family",
    ["llada2", *(pytest.param(name, marks=pytest.mark.long) for name in ("sdar", "gemma"))],
)
def test_new_weights(family: str, tmp_path: Path) -> None:
    path, length, _, _ = FAMILIES[family]
    options: dict[str, Any] = dict(TEXT_ONLY_OPTIONS) if family == "gemma" else {}
    asked = list(mixed(family, 12))
    weights = changed(path, tmp_path / "changed")
    with engine(tmp_path / "changed", length, **options) as running:
        wanted = answers(running, asked)
    with engine(path, length, **options) as running:
        old = answers(running, asked)
        assert old != wanted, "the change of weights shows"
        # In one piece, of which vLLM makes what its kernels read.
        running.runner.reload_weights(weights_iterator=iter(weights.items()))
        running.llm.reset_prefix_cache()
        assert answers(running, asked) == wanted
        # Back, in parts.
        before = load_file(path / "model.safetensors")
        names = list(before)
        half = len(names) // 2
        parts = ({name: before[name] for name in some} for some in (names[:half], names[half:]))
        for part in parts:
            running.runner.reload_weights(weights_iterator=iter(part.items()))
        running.llm.reset_prefix_cache()
        assert answers(running, asked) == old
