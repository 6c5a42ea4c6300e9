"""Checkpoints that do not fit: refused by name while loading, and no engine is left over."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import engine, greedy
from tests.support.reference_gemma import random_checkpoint as gemma_checkpoint
from tests.support.reference_llada2 import random_checkpoint as llada2_checkpoint

pytestmark = pytest.mark.engine

Tensors = dict[str, torch.Tensor]
TENSOR = {
    "llada2": "model.layers.1.attention.dense.weight",
    "gemma": "model.decoder.layers.1.self_attn.o_proj.weight",
}


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
    copy = tmp_path / made.name
    copy.mkdir()
    for file in made.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def refused(path: Path) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught, engine(path, 32, **TEXT_ONLY_OPTIONS):
        pass
    return str(caught.value)


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_an_unknown_tensor(broken: Path) -> None:
    name = TENSOR[broken.name]
    change_tensors(broken, lambda t: t.update({name.replace("weight", "wait"): t[name].clone()}))
    message = refused(broken)
    assert "unexpected tensor" in message
    assert name.replace("weight", "wait") in message


def test_a_wrong_shape(broken: Path) -> None:
    name = TENSOR[broken.name]
    change_tensors(broken, lambda t: t.update({name: t[name][:-8].clone()}))
    message = refused(broken)
    assert name in message
    assert "has shape" in message


def test_a_missing_tensor(broken: Path) -> None:
    name = TENSOR[broken.name]
    change_tensors(broken, lambda t: t.pop(name))
    assert name.removeprefix("model.decoder.") in refused(broken)


@pytest.mark.parametrize("made", ["gemma"], indirect=True)
def test_a_copy_that_differs(broken: Path) -> None:
    """An encoder's copy beside the decoder's; equal ones are one tensor."""
    name = TENSOR["gemma"]
    copy = name.replace("decoder", "encoder.language_model")
    change_tensors(broken, lambda t: t.update({copy: t[name].clone()}))
    with engine(broken, 32, **TEXT_ONLY_OPTIONS):
        pass
    change_tensors(broken, lambda t: t[copy].view(-1)[-1:].neg_())
    message = refused(broken)
    assert name in message and copy in message and "differ" in message


@pytest.mark.parametrize("made", ["gemma"], indirect=True)
def test_a_number_of_the_encoder_that_differs(broken: Path) -> None:
    """Every published checkpoint has these twice, and vLLM's model has one of each."""
    names = [
        f"model.{half}.layers.1.layer_scalar" for half in ("encoder.language_model", "decoder")
    ]
    change_tensors(broken, lambda t: t[names[0]].mul_(2))
    message = refused(broken)
    assert all(name in message for name in names) and "differ" in message


def test_a_stale_file_with_the_same_names(broken: Path) -> None:
    """Without an index all files are read, and the last one would win."""
    tensors = load_file(broken / "model.safetensors")
    name = TENSOR[broken.name]
    save_file({name: tensors[name] + 1}, broken / "older.safetensors", {"format": "pt"})
    message = refused(broken)
    assert name in message and "differ" in message


@pytest.mark.parametrize(
    "size", [100_000, *(pytest.param(n, marks=pytest.mark.long) for n in (7, 300))]
)
def test_a_damaged_file(broken: Path, size: int) -> None:
    """Cut off inside the length, the header and the tensors; no engine starts with the rest."""
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    # vLLM reads the header by itself where the head is tied to the embedding.
    reasons = (SafetensorError, ValueError, struct.error)
    with pytest.raises(reasons), engine(broken, 32, **TEXT_ONLY_OPTIONS):
        pass


def edit(file: Path, *path: str) -> None:
    """Remove a key."""
    content = json.loads(file.read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    file.write_text(json.dumps(content))


SAMPLER = (
    *(("max_denoising_steps",), ("t_min",), ("t_max",), ("stability_threshold",)),
    *(("confidence_threshold",), ("sampler_config",), ("sampler_config", "entropy_bound")),
)


@pytest.mark.parametrize(
    "key",
    [SAMPLER[-1], *(pytest.param(key, marks=pytest.mark.long) for key in SAMPLER[:-1])],
    ids=lambda key: ".".join(key),
)
@pytest.mark.parametrize("made", ["gemma"], indirect=True)
def test_gemma_without_a_sampler_field(broken: Path, key: tuple[str, ...]) -> None:
    edit(broken / "generation_config.json", *key)
    message = refused(broken)
    assert "generation_config.json" in message
    assert f"'{'.'.join(key)}'" in message


@pytest.mark.parametrize("made", ["gemma"], indirect=True)
def test_gemma_without_a_canvas_length(broken: Path) -> None:
    """transformers would take 256 without a word; `--diffusion-config` may say it instead."""
    edit(broken / "config.json", "canvas_length")
    with (
        pytest.raises(RuntimeError, match="no 'canvas_length'"),
        engine(broken, 32, diffusion_config=None, **TEXT_ONLY_OPTIONS),
    ):
        pass
    with engine(broken, 32, **TEXT_ONLY_OPTIONS) as running:
        assert len(running.generate([[5, 6, 7]], [greedy(3, ignore_eos=True)])[0][0]) == 3
