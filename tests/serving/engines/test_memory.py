"""The memory that `benchmarks/model_memory.py` computes is what a real engine holds and reports.

Parameters, pages of the KV cache and the state of requests are compared byte by byte. Of the
buffers only the rotary tables are computed: beside them vLLM has a few numbers for each layer.
"""

from __future__ import annotations

import json
import shutil
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
from tests.support.long import long_but
from tests.support.published import sdar_config
from tests.support.quantized import GROUP, quantized

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS: dict[str, Any] = {
    "worker_extension_cls": "tests.support.loaded.Recorder",
    "max_num_seqs": 4,
    "dtype": "bfloat16",
}
TINY = {"llada2": TINY_LLADA2, "gemma": TINY_GEMMA, "sdar": TINY_SDAR}
# Numbers beside rotary tables: scales of attention and of layers, frequencies. Less than this
# many bytes for each layer, and once more for the model.
BESIDE = 128


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


def held_and_reported(llm: Any) -> tuple[list[dict[str, int]], dict[str, int]]:
    """What each rank holds after a request, and what the engine reports."""
    from tests.support.loaded import cache_report

    params = [greedy(4, diffusion_max_steps=1)]
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    return llm.collective_rpc("held"), cache_report(llm)


def of_ranks(path: str, block: int, options: dict[str, Any]) -> Iterator[Any]:
    """The same of several ranks, in a process of its own."""
    from vllm import LLM

    yield held_and_reported(LLM(model=path, **(settings(block) | options)))


def slice_of(name: str, path: Path) -> Path:
    """A checkpoint without weights, of the published width with two layers."""
    if name in SYSTEMS:
        write_checkpoint(SYSTEMS[name], path, tiny=False, layers=2)
        return path
    shutil.copytree(TINY_SDAR, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = sdar_config(name) | {"num_hidden_layers": 2, "mask_token_id": 151669}
    (path / "config.json").write_text(json.dumps(config))
    return path


WEIGHTS = {
    None: model_memory.unquantized(),
    "fp8-dynamic": model_memory.float8(),
    "w4a16": model_memory.int4(GROUP),
}
SLICES = ("LLaDA2.0-mini", "DiffusionGemma", "sdar-1.7b-chat")
# DiffusionGemma's full-attention layers have one head of keys, which both ranks hold. Slices have
# the published widths, so that a page of the cache is as large as it will be.
CASES: list[tuple[str, str | None, int]] = [
    ("llada2", None, 1),
    *(("gemma", None, 1), ("sdar", None, 1), ("llada2", None, 2), ("gemma", None, 2)),
    *((name, scheme, 1) for name in ("llada2", "gemma") for scheme in ("fp8-dynamic", "w4a16")),
    *((name, None, 1) for name in SLICES),
]


@pytest.mark.parametrize(("name", "scheme", "ranks"), long_but(CASES[:1], CASES))
def test_what_is_computed_is_held(
    name: str, scheme: str | None, ranks: int, tmp_path: Path
) -> None:
    if name in SLICES:
        path = slice_of(name, tmp_path / "model")
    else:
        path = quantized(tmp_path, name, {scheme: "Linear"}) if scheme else TINY[name]
    model = geometry(json.loads((path / "config.json").read_text()))
    options = OPTIONS | (TEXT_ONLY_OPTIONS if model.is_uniform else {})
    options |= {"load_format": "dummy"} if name in SLICES else {}
    if ranks > 1:
        both = options | {"tensor_parallel_size": ranks}
        ((held, report),) = in_child(of_ranks, path, model.canvas, both)
    else:
        with engine(path, model.canvas, **options) as running:
            held, report = held_and_reported(running.llm)
    assert len(held) == ranks
    check(model, WEIGHTS[scheme], held, report)
