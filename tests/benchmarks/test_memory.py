"""The memory of published models, and the floor of a step, are computed from what is published."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import model_memory
from benchmarks.published import (
    LLADA2_FLASH,
    LLADA2_MINI,
    SHAPES,
)
from tests.benchmarks.geometries import geometry
from tests.support.published import (
    gemma_config,
    gemma_tensors,
    llada2_config,
    llada2_tensors,
    sdar_config,
    sdar_tensors,
)

PUBLISHED = {
    "LLaDA2.x-mini": (llada2_config, llada2_tensors, ("llada2-mini",)),
    "LLaDA2.x-flash": (llada2_config, llada2_tensors, ("llada2-flash",)),
    "SDAR-1.7B": (sdar_config, sdar_tensors, ("sdar-1.7b-chat",)),
    "SDAR-30B-A3B": (sdar_config, sdar_tensors, ("sdar-30b-a3b-chat",)),
    "DiffusionGemma-26B-A4B": (lambda: gemma_config().to_dict(), gemma_tensors, ()),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_geometry_is_that_of_its_configuration(name: str) -> None:
    config, tensors, checkpoint = PUBLISHED[name]
    model = SHAPES[name]
    assert replace(geometry(config(*checkpoint)), vision=model.vision) == model
    counted = sum(math.prod(shape) for shape in tensors(*checkpoint).values())
    # Encoder and decoder have a scalar each for every layer.
    scalars = 2 * model.layers if model.is_uniform else 0
    assert model_memory.parameters(model)[0] == counted - scalars


def test_the_bytes_of_published_indexes() -> None:
    """Total sizes that LLaDA2.0's indexes state, and the one file of SDAR-1.7B-Chat."""
    for model, size in ((LLADA2_MINI, 32_511_286_784), (LLADA2_FLASH, 205_779_410_432)):
        assert 2 * model_memory.parameters(model)[0] == size
    assert round(2 * model_memory.parameters(SHAPES["SDAR-1.7B"])[0] / 1e9, 2) == 4.06


def test_tables_are_those_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_memory.main(["--check"]) == 0, capsys.readouterr().err
