"""``--override-generation-config``: the decoding settings in it act as in the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import TINY
from tests.support.engine import engine, greedy

pytestmark = pytest.mark.engine
PROMPT = list(range(5, 25))
LENGTHS = {"tiny-llada2": 32, "tiny-sdar": 4, "tiny-diffusiongemma": 32}


def answer(model: Path, length: int, **options: Any) -> tuple[list[int], float]:
    """The tokens of an answer, and the denoise steps that it took."""
    with engine(model, length, disable_log_stats=False, **options) as running:

        def steps() -> float:
            name = "vllm:diffusion_num_denoising_steps"
            return sum(m.value for m in running.llm.get_metrics() if m.name == name)

        before = steps()
        ((tokens, _),) = running.generate([PROMPT], [greedy(64, ignore_eos=True)])
        return tokens, steps() - before


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("tiny-llada2", {"threshold": 1.0, "max_denoising_steps": 5}),
        pytest.param("tiny-sdar", {"threshold": 1.0}, marks=pytest.mark.long),
        pytest.param(
            *("tiny-diffusiongemma", {"max_denoising_steps": 1, "t_max": 0.5}),
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_override_acts_as_the_file(model: str, fields: dict[str, Any], tmp_path: Path) -> None:
    length = LENGTHS[model]
    overridden = answer(TINY / model, length, override_generation_config=fields)
    copy = shutil.copytree(TINY / model, tmp_path / "model")
    file = copy / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert answer(copy, length) == overridden
    assert overridden[1] != answer(TINY / model, length)[1]
