"""The memory that `benchmarks/model_memory.py` computes is what a real engine holds and reports.

Parameters, pages of the KV cache and the state of requests are compared byte by byte. Of the
buffers only the rotary tables are computed: beside them vLLM has a few numbers for each layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import model_memory
from benchmarks.published import Geometry
from benchmarks.real_size import SYSTEMS, write_checkpoint
from tests.benchmarks.geometries import geometry
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.child import in_child
from tests.support.engine import engine, greedy, settings
from tests.support.published import sdar_config
from tests.support.quantized import GROUP, quantized

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = {
    "worker_extension_cls": "tests.support.loaded.Recorder",
    "max_num_seqs": 4,
    "dtype": "bfloat16",
}
TINY = {"llada2": TINY_LLADA2, "gemma": TINY_GEMMA, "sdar": TINY_SDAR}
# Numbers beside rotary tables: scales of attention and of layers, frequencies. Less than this
# many bytes for each layer, and once more for the model.
BESIDE = 128


def options_for(model: Geometry) -> dict[str, Any]:
    return OPTIONS | (TEXT_ONLY_OPTIONS if model.is_uniform else {})


def check(
    model: Geometry,
    weights: model_memory.Weights,
    held: list[dict[str, int]],
    report: dict[str, int],
) -> None:
    """Compare what each rank holds, and what the engine reports, with what is computed."""
    devices = len(held)
    for rank in held:
        assert rank["parameters"] == model_memory.parameter_bytes(model, weights, devices)
        beside = rank["buffers"] - model_memory.table_bytes(model, weights.width)
        assert 0 <= beside <= BESIDE * (model.layers + 1)
        # Beside the slots: the positions of a canvas, and a canvas of masks.
        state = rank["state"] - rank["slots"] * model_memory.slot_bytes(model, weights.width)
        fixed = 8 * model.canvas * (1 if model.is_uniform else 2)
        # Without windows of two blocks a slot has no block and no flag before its canvas.
        window = 0 if model.is_uniform else rank["slots"] * (8 * model.canvas + 1)
        assert state in (fixed, 8 * model.canvas - window)
    layout = model_memory.cache(model, devices, report["page"], weights.width)
    assert report["blocks"] == (1 << 26) // layout.page_bytes
    assert report["tokens"] == layout.tokens(1 << 26, report["context"], report["in_flight"])


def in_process(path: Path, model: Geometry, **options: Any) -> tuple[list, dict[str, int]]:
    from tests.support.loaded import cache_report

    with engine(path, model.canvas, **(options_for(model) | options)) as running:
        running.generate([[5, 6, 7]], [greedy(4, diffusion_max_steps=1)])
        return running.llm.collective_rpc("held"), cache_report(running.llm)


def held_by_ranks(path: str, block: int, options: dict[str, Any]) -> Iterator[Any]:
    """What each rank holds, and what the engine reports, in a process of its own."""
    from vllm import LLM

    from tests.support.loaded import cache_report

    llm = LLM(model=path, **(settings(block) | options))
    params = [greedy(4, diffusion_max_steps=1)]
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    yield llm.collective_rpc("held"), cache_report(llm)


@pytest.mark.parametrize(
    "name", ["llada2", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma", "sdar"))]
)
def test_tiny(name: str) -> None:
    model = geometry(json.loads((TINY[name] / "config.json").read_text()))
    check(model, model_memory.unquantized(), *in_process(TINY[name], model))


@pytest.mark.long
@pytest.mark.parametrize("name", ["llada2", "gemma"])
def test_two_ranks(name: str) -> None:
    """DiffusionGemma's full-attention layers have one head of keys, which both ranks hold."""
    model = geometry(json.loads((TINY[name] / "config.json").read_text()))
    options = options_for(model) | {"tensor_parallel_size": 2}
    ((held, report),) = in_child(held_by_ranks, TINY[name], model.canvas, options)
    assert len(held) == 2
    check(model, model_memory.unquantized(), held, report)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llada2", "gemma"])
@pytest.mark.parametrize("scheme", ["fp8-dynamic", "w4a16"])
def test_quantized(name: str, scheme: str, tmp_path: Path) -> None:
    path = quantized(tmp_path, name, {scheme: "Linear"})
    model = geometry(json.loads((TINY[name] / "config.json").read_text()))
    weights = model_memory.float8() if scheme == "fp8-dynamic" else model_memory.int4(GROUP)
    held, report = in_process(path, model)
    check(model, weights, held, report)


def slice_of(name: str, path: Path) -> Geometry:
    """A checkpoint without weights, of the published width with two layers."""
    if name in SYSTEMS:
        write_checkpoint(SYSTEMS[name], path, tiny=False, layers=2)
    else:
        path.mkdir()
        for file in TINY_SDAR.iterdir():
            if file.suffix != ".safetensors":
                (path / file.name).write_bytes(file.read_bytes())
        config = sdar_config(name) | {"num_hidden_layers": 2, "mask_token_id": 151669}
        (path / "config.json").write_text(json.dumps(config))
    return geometry(json.loads((path / "config.json").read_text()))


@pytest.mark.long
@pytest.mark.parametrize("name", ["LLaDA2.0-mini", "DiffusionGemma", "sdar-1.7b-chat"])
def test_slices(name: str, tmp_path: Path) -> None:
    """Published widths, two layers; a page of the cache is as large as it will be."""
    model = slice_of(name, tmp_path / "model")
    assert model.layers == 2
    held, report = in_process(tmp_path / "model", model, load_format="dummy")
    check(model, model_memory.unquantized(), held, report)
