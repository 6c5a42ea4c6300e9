"""What vLLM compiles by default, compiled: the same answers, and nothing is compiled later on."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch._dynamo.utils import counters as dynamo

from tests.support.drive import Family, gemma, llada2
from tests.support.engine import Engine, engine, our_graphs
from tests.support.mixed_requests import FAMILIES, completions, mixed
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.ops.compiled import CompiledOnce, compiled
from vllm_dllm.ops.noise.keyed import candidate_keys, step_noise
from vllm_dllm.ops.statistics.rows import row_statistics

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (3, 20, 33, 47, 64)


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    if request.param == "llada2":
        return llada2()
    return gemma(tmp_path_factory.mktemp("gemma") / "model")


def sampling(family: Family, **options: Any) -> Any:
    """A request whose first canvas takes some steps, drawn at temperature 1."""
    params = family.params(2 * family.length, ignore_eos=True, **options)
    params.temperature = 1.0
    return params


def answers(running: Engine, family: Family) -> list[list[list[int]]]:
    """Greedy and drawn: alone, and five at a time; a narrow canvas among them."""
    prompts = family.prompts(LENGTHS, seed=3)
    greedy = [family.params(2 * family.length, "quick", ignore_eos=True)] * len(prompts)
    drawn = [sampling(family, seed=n) for n in range(len(prompts))]
    if not family.aligned:
        drawn[2] = sampling(family, seed=2, diffusion_canvas_length=family.length // 2)
    return [
        [tokens for tokens, _ in running.generate(some, params[: len(some)])]
        for params in (greedy, drawn)
        for some in (prompts[:1], prompts)
    ]


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
    return asked


def test_compiled_engine(family: Family) -> None:
    with family.start() as running:
        assert not is_compiled(running)
        want = answers(running, family)
    with family.start(enforce_eager=False) as running:
        assert is_compiled(running)
        assert our_graphs(), "something was compiled"
        made = dynamo["stats"]["unique_graphs"]
        assert answers(running, family) == want
        assert dynamo["stats"]["unique_graphs"] == made, "compiled while serving"
    assert want[2][0] == want[3][0], "a seed's answer does not depend on its neighbours"


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
    draw = random.Random(0)
    path, block = FAMILIES[name][:2]
    with engine(path, block, max_num_seqs=8, enforce_eager=False) as running:
        made = dynamo["stats"]["unique_graphs"]
        update, found = running.runner.sampler.canvas_update, []
        compilable = update.compilable

        def looked_up(function: Any, compile: bool, *kind: Any) -> Any:
            form = compilable(function, compile, *kind)
            if compile:
                found.append(isinstance(form, CompiledOnce))
            return form

        update.compilable = looked_up
        asked = mixed_requests(name, count)
        plain: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "extra_args": {}}
        completions(running, [(asked[0][0], plain)], {})
        while asked:
            batch = [asked.pop() for _ in range(min(len(asked), draw.choice([1, 2, 5, 8, 16])))]
            completions(running, batch, {})
        assert dynamo["stats"]["unique_graphs"] == made
        assert found and all(found), f"{found.count(False)} of {len(found)} ran uncompiled"
