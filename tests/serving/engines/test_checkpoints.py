"""Checkpoints that do not fit: refused by name while loading, and no engine is left over."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import engine, greedy
from tests.support.long import long_but
from tests.support.reference_gemma import random_checkpoint as gemma_checkpoint
from tests.support.reference_llada2 import random_checkpoint as llada2_checkpoint

pytestmark = pytest.mark.engine

Tensors = dict[str, torch.Tensor]
TENSOR = {
    "llada2": "model.layers.1.attention.dense.weight",
    "gemma": "model.decoder.layers.1.self_attn.o_proj.weight",
}


of_gemma = pytest.mark.parametrize("made", ["gemma"], indirect=True)


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / request.param
    if request.param == "llada2":
        llada2_checkpoint(path, 0)
    else:
        gemma_checkpoint(path, 0)
    return path


@pytest.fixture
def broken(made: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(made, tmp_path / made.name))


def refused(path: Path) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught, engine(path, 32, **TEXT_ONLY_OPTIONS):
        pass
    return str(caught.value)


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_tensors_that_do_not_fit(broken: Path) -> None:
    """Unknown, of another shape, or missing."""
    name = TENSOR[broken.name]
    unknown, right = name.replace("weight", "wait"), load_file(broken / "model.safetensors")
    changes: list[tuple[Callable[[Tensors], object], tuple[str, ...]]] = [
        (lambda t: t.update({unknown: t[name].clone()}), ("unexpected tensor", unknown)),
        (lambda t: t.update({name: t[name][:-8].clone()}), ("has shape", name)),
        (lambda t: t.pop(name), (name.removeprefix("model.decoder."),)),
    ]
    for change, words in changes:
        change_tensors(broken, change)
        message = refused(broken)
        assert all(word in message for word in words), message
        save_file(right, broken / "model.safetensors", {"format": "pt"})


@of_gemma
def test_a_copy_that_differs(broken: Path) -> None:
    """An encoder's copy beside the decoder's; equal ones are one tensor.

    Every published checkpoint has the numbers of layers twice, and vLLM's model one of each.
    """
    name = TENSOR["gemma"]
    copy = name.replace("decoder", "encoder.language_model")
    change_tensors(broken, lambda t: t.update({copy: t[name].clone()}))
    with engine(broken, 32, **TEXT_ONLY_OPTIONS):
        pass
    number = "model.encoder.language_model.layers.1.layer_scalar"
    change_tensors(broken, lambda t: t[copy].view(-1)[-1:].neg_())
    for one, other in ((copy, name), (number, "model.decoder.layers.1.layer_scalar")):
        message = refused(broken)
        assert one in message and other in message and "differ" in message
        change_tensors(broken, lambda t: (t.pop(copy, None), t[number].mul_(2)))


@pytest.mark.parametrize("size", long_but([100_000], (100_000, 7, 300)))
def test_a_damaged_file(broken: Path, size: int) -> None:
    """Cut off inside the length, the header and the tensors; no engine starts with the rest."""
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    # vLLM reads the header by itself where the head is tied to the embedding.
    reasons = (SafetensorError, ValueError, struct.error)
    with pytest.raises(reasons), engine(broken, 32, **TEXT_ONLY_OPTIONS):
        pass


@of_gemma
def test_gemma_without_a_canvas_length(broken: Path) -> None:
    """transformers would take 256 without a word; `--diffusion-config` may say it instead."""
    file = broken / "config.json"
    stated = json.loads(file.read_text())
    del stated["canvas_length"]
    file.write_text(json.dumps(stated))
    with (
        pytest.raises(RuntimeError, match="no 'canvas_length'"),
        engine(broken, 32, diffusion_config=None, **TEXT_ONLY_OPTIONS),
    ):
        pass
    with engine(broken, 32, **TEXT_ONLY_OPTIONS) as running:
        assert len(running.generate([[5, 6, 7]], [greedy(3, ignore_eos=True)])[0][0]) == 3
