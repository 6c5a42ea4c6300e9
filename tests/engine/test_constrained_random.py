"""Structured output of models with random weights: they have no idea of any task."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.constrained import CASES, MODELS, fuzz, with_random_weights
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY
from tests.support.engine import engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("family", MODELS)
def test_every_output_is_valid_and_finished(family: str, tmp_path: Path) -> None:
    path = with_random_weights(TINY / MODELS[family][0], tmp_path / family, 3)
    with engine(path, 32, max_num_seqs=32, **TEXT_ONLY_OPTIONS) as started:
        fuzz(started, family, CASES // 20, 2)
