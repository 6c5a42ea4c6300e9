"""What vLLM compiles by default, compiled: the same answers, and nothing is compiled later on."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch._dynamo.utils import counters as dynamo

from tests.support.engine import Engine, engine, our_graphs
from tests.support.mixed_requests import FAMILIES, completions, mixed
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.ops.compiled import CompiledOnce, compiled
from vllm_dllm.ops.noise.keyed import candidate_keys, step_noise
from vllm_dllm.ops.statistics.rows import row_statistics

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def is_compiled(running: Engine) -> bool:
    readout = running.runner.model_state.readout
    if isinstance(readout, NoiseReadout):
        assert (readout.noise == compiled(step_noise)) == readout.statistics.keywords["compile"]
        return readout.noise == compiled(step_noise)
    assert type(readout) is MaskedReadout
    (same,) = {
        readout.statistics is not row_statistics,
        readout.pipeline.keys is compiled(candidate_keys),
        isinstance(readout.pipeline.draw, CompiledOnce),
    }
    return same


def mixed_requests(family: str, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Requests with every option; half of them are decoded by the server's own algorithm."""
    asked = list(mixed(family, count))
    for _, options in asked[::2]:
        del options["extra_args"]["diffusion_algorithm"]
    if family == "gemma":
        asked[2][1]["extra_args"]["diffusion_canvas_length"] = 16
    plain: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "extra_args": {}}
    return [(asked[0][0], plain), *asked]


def answers(running: Engine, asked: list[Any]) -> list[list[list[int]]]:
    return [[list(o.token_ids) for o in each] for each in completions(running, asked, {})]


def looked_up(running: Engine) -> list[bool]:
    """Grows with each update that may be compiled: whether it found a form that is."""
    update, found = running.runner.sampler.canvas_update, []
    compilable = update.compilable

    def watched(function: Any, compile: bool, *kind: Any) -> Any:
        form = compilable(function, compile, *kind)
        if compile:
            found.append(isinstance(form, CompiledOnce))
        return form

    update.compilable = watched
    return found


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("llada2", 30), ("gemma", 30)),
        *(pytest.param(name, 600, marks=pytest.mark.long) for name in FAMILIES),
    ],
)
def test_mixed_requests_compile_nothing(name: str, count: int) -> None:
    """Alone, and with up to fifteen others; after the start nothing is left to compile.

    Every update that may be compiled finds the form that was compiled at the start.
    """
    draw, asked = random.Random(0), mixed_requests(name, count)
    path, block = FAMILIES[name][:2]
    with engine(path, block, max_num_seqs=8) as running:
        assert not is_compiled(running)
        wanted = answers(running, asked)
    with engine(path, block, max_num_seqs=8, enforce_eager=False) as running:
        assert is_compiled(running)
        assert our_graphs(), "something was compiled"
        made, found = dynamo["stats"]["unique_graphs"], looked_up(running)
        got = answers(running, asked[:1])
        while len(got) < len(asked):
            got += answers(running, asked[len(got) :][: draw.choice([1, 2, 5, 8, 16])])
        assert dynamo["stats"]["unique_graphs"] == made, "compiled while serving"
        assert found and all(found), f"{found.count(False)} of {len(found)} ran uncompiled"
    different = [n for n, each in enumerate(got) if each != wanted[n]]
    assert not different, f"{len(different)} of {len(asked)}"
