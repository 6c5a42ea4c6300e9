"""How blocks are committed and how many a canvas holds: what is chosen, refused and logged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.reference_diffcoder import random_checkpoint as diffcoder
from tests.support.reference_sdar import random_checkpoint
from vllm_dllm.startup.commit_choice import FREE_TOKENS_CPU
from vllm_dllm.vllm_seams.registration import RefusedError

pytestmark = pytest.mark.engine

ASYNCHRONOUS: dict[str, Any] = {"async_scheduling": True}
FEW = FREE_TOKENS_CPU // 8  # requests whose windows of two blocks of 4 are nearly free


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {
        name: random_checkpoint(place / name, experts=name == "experts", block=4)
        for name in ("dense", "experts")
    }


def config(model: Path, commit: str | None = None, **options: Any) -> Any:
    """vLLM's configuration of an engine with this value of ``dllm.fused_commit``."""
    from vllm.engine.arg_utils import EngineArgs

    if commit is not None:
        options["additional_config"] = {"dllm": {"fused_commit": commit}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngineArgs(model=str(model), **options).create_engine_config()


@pytest.mark.parametrize(
    ("model", "options", "two_blocks"),
    [
        ("dense", {"max_num_seqs": FEW}, True),
        ("dense", {"max_num_seqs": FEW + 1}, False),
        ("experts", {"max_num_seqs": FEW}, False),
        ("experts", {"max_num_seqs": FEW, "commit": "on"}, True),
        ("dense", {"max_num_seqs": 64, "commit": "on"}, True),
        ("dense", {"max_num_seqs": FEW, "commit": "off"}, False),
        ("dense", {"max_num_seqs": FEW, "max_model_len": 4}, False),
        ("dense", {"max_num_seqs": FEW, "async_scheduling": False}, False),
        ("dense", {"max_num_seqs": 64, "commit": "on", "async_scheduling": False}, False),
    ],
)
def test_where_steps_read_two_blocks(
    models: dict[str, Path], model: str, options: dict[str, Any], two_blocks: bool
) -> None:
    found = config(models[model], **(ASYNCHRONOUS | options))
    assert found.model_config.dllm.two_blocks == two_blocks
    assert found.model_config.dllm.length == 4
    assert found.num_speculative_tokens == (8 if two_blocks else 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 64, **ASYNCHRONOUS}, ["own", "nearly free; set --max-num-seqs"]),
        ({"max_num_seqs": FEW, **ASYNCHRONOUS}, ["every step", f"{FEW} requests x 8 tokens"]),
        ({"async_scheduling": False}, ["first step", "synchronous"]),
        ({"commit": "off"}, ["own", "dllm.fused_commit=off"]),
    ],
)
def test_the_log_says_why(
    models: dict[str, Path],
    options: dict[str, Any],
    words: list[str],
    package_log: pytest.LogCaptureFixture,
) -> None:
    config(models["dense"], **options)
    (line,) = (m for m in package_log.messages if "blocks are committed" in m)
    assert all(word in line for word in words), line


# ---- `dllm.blocks`


def blocks(count: int, **settings: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": {"blocks": count, **settings}}}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_canvas_holds_the_blocks(models: dict[str, Path], asynchronous: bool) -> None:
    found = config(models["dense"], async_scheduling=asynchronous, max_num_seqs=2, **blocks(4))
    served = found.model_config.dllm
    assert (served.length, served.window_length, found.num_speculative_tokens) == (4, 16, 16)
    assert served.commits == "separate"
    assert found.cache_config.block_size % 4 == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (blocks(4, fused_commit="on"), "fused_commit=on: impossible, because all blocks of a"),
        (blocks(4) | {"max_model_len": 12}, "dllm.blocks=4: the context of 12 tokens has no room"),
        (blocks(64) | {"max_num_batched_tokens": 128}, "max_num_batched_tokens=128 is below"),
    ],
)
def test_blocks_that_are_refused(
    models: dict[str, Path], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RefusedError, match=complaint):
        config(models["dense"], **options)


def test_other_families_refuse_blocks(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="StableDiffCoder cannot decode several"):
        config(diffcoder(tmp_path), **blocks(2))
