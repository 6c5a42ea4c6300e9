"""Before the first request the readout meets its largest batch, and all is compiled for good."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters as dynamo

from tests.support.child import in_child
from tests.support.drive import Family, gemma, llada2
from tests.support.engine import Engine, count_calls, engine, greedy, our_graphs
from tests.support.mixed_requests import FAMILIES, completions, mixed
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.warm_up import compile_updates
from vllm_dllm.ops.compiled import CompiledOnce, compiled
from vllm_dllm.ops.noise.keyed import candidate_keys, step_noise
from vllm_dllm.ops.statistics.rows import row_statistics
from vllm_dllm.ops.statistics.sampled import sampled_partials

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEATS = 5


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    if request.param == "llada2":
        return llada2()
    return gemma(tmp_path_factory.mktemp("gemma") / "model")


def state_of(slots: SlotState) -> dict[str, Any]:
    """Copies of everything that a slot consists of, on the device and on the host."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value.copy()
        for name, value in vars(slots).items()
        if isinstance(value, torch.Tensor) or hasattr(value, "dtype")
    }


def test_the_profile_run_reads_the_largest_batch(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All seats at once, whole rows among them; what comes after is what it was before."""
    prompts = family.prompts((3, 20, 33), seed=1)
    params = [family.params(2 * family.length, ignore_eos=True) for _ in prompts]
    with family.start(max_num_seqs=SEATS) as running:
        want = running.generate(prompts, params)
        state = running.runner.model_state
        before, read, seen = state_of(state.slots), state.readout.read, []
        drawn: list[bool] = []

        def watched(hidden: torch.Tensor, request: Any) -> Any:
            seen.append((len(hidden), request.draws, request.needs_rows))
            found = read(hidden, request)
            token = getattr(found.statistics, "sample", found.statistics.token)
            drawn.append(len(token.unique()) > 1)  # the hidden states are the same everywhere
            return found

        whole = "rows" if state.slots.kind.mask_token is None else "head"
        rows_of_logits = count_calls(state.readout, whole)
        with monkeypatch.context() as patch:
            patch.setattr(state.readout, "read", watched)
            running.runner.profile_run()
        all_rows = SEATS * family.length
        assert set(seen) == {(all_rows, True, False), (all_rows, True, True)}
        most = min(SEATS, state.readout.canvases) * family.length
        assert max(map(len, rows_of_logits)) == most
        assert all(drawn), "tokens are drawn while memory is measured"
        after = state_of(state.slots)
        for name, value in before.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: (a == b).all()
            assert same(value, after[name])
        assert not state.parts.rows.by_slot
        assert not state.parts.logprobs.pending
        assert running.generate(prompts, params) == want


def graphs_with_fewer_threads(model: str, block: int) -> Iterator[dict[str, int]]:
    """Graphs that a step makes after the number of threads has changed, in a process of its own.

    vLLM's GPU worker loads a model with many threads and then leaves one to serve with; its CPU
    worker does not, so that is done here.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    # vLLM's CPU worker replaces the function by one that does nothing.
    load, set_num_threads = GPUModelRunner.load_model, torch.set_num_threads

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        set_num_threads(2)
        load(self, *args, **kwargs)
        set_num_threads(1)

    GPUModelRunner.load_model = load_model  # type: ignore[method-assign]
    with engine(Path(model), block, enforce_eager=False, max_num_seqs=2) as running:
        ahead = our_graphs()
        answers = running.generate([[7, 8, 9]], [greedy(block, ignore_eos=True)])
        yield {"ahead": ahead, "after": our_graphs(), "tokens": len(answers[0][0])}


@pytest.mark.long
def test_a_changed_number_of_threads_compiles_nothing_again(family: Family) -> None:
    (found,) = in_child(graphs_with_fewer_threads, family.path, family.length)
    assert found["tokens"] == family.length
    assert found["ahead"], "something was compiled"
    assert found["after"] == found["ahead"], "compiled while serving"


# ---- What vLLM compiles by default: the same answers, and nothing is compiled later on


def is_compiled(running: Engine) -> bool:
    readout = running.runner.model_state.readout
    if isinstance(readout, NoiseReadout):
        same = readout.noise == compiled(step_noise)
        assert same == (readout.pass_over == compiled(sampled_partials))
        return same
    assert type(readout) is MaskedReadout
    (same,) = {
        readout.statistics is not row_statistics,
        readout.pipeline.keys is compiled(candidate_keys),
        isinstance(readout.pipeline.draw, CompiledOnce),
    }
    return same


def mixed_requests(family: str, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Requests with every option; half of them are decoded by the server's own algorithm.

    A third asks for step maps.
    """
    asked = list(mixed(family, count))
    for _, options in asked[::2]:
        del options["extra_args"]["diffusion_algorithm"]
    for _, options in asked[1::3]:
        options["extra_args"]["diffusion_return_step_maps"] = True
    if family == "gemma":
        asked[2][1]["extra_args"]["diffusion_canvas_length"] = 16
    plain: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "extra_args": {}}
    return [(asked[0][0], plain), *asked]


def answers(running: Engine, asked: list[Any]) -> list[tuple[list[Any], list[float]]]:
    """Of each request: tokens and step maps, and the logprobs of its tokens."""
    return [
        (
            [(list(one.token_ids), getattr(one, "step_maps", None)) for one in each],
            [
                place[token].logprob
                for one in each
                if one.logprobs
                for place, token in zip(one.logprobs, one.token_ids, strict=True)
            ],
        )
        for each in completions(running, asked, {})
    ]


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

    Every update that may be compiled finds the form that was compiled at the start. Of many
    requests, the steps of all algorithms are compiled, as on a GPU.
    """
    draw, asked = random.Random(0), mixed_requests(name, count)
    path, block = FAMILIES[name][:2]
    with engine(path, block, max_num_seqs=8) as running:
        assert not is_compiled(running)
        wanted = answers(running, asked)
    with engine(path, block, max_num_seqs=8, enforce_eager=False) as running:
        assert is_compiled(running)
        assert our_graphs(), "something was compiled"
        if count > 100:
            state = running.runner.model_state
            compile_updates(state, state.served.algorithm_names)
        made, found = dynamo["stats"]["unique_graphs"], looked_up(running)
        got = answers(running, asked[:1])
        while len(got) < len(asked):
            got += answers(running, asked[len(got) :][: draw.choice([1, 2, 5, 8, 16])])
        assert dynamo["stats"]["unique_graphs"] == made, "compiled while serving"
        assert found and all(found), f"{found.count(False)} of {len(found)} ran uncompiled"
    different = [n for n, (exact, _) in enumerate(got) if exact != wanted[n][0]]
    assert not different, f"{len(different)} of {len(asked)}"
    for (_, found_scores), (_, scores) in zip(got, wanted, strict=True):
        assert found_scores == pytest.approx(scores, abs=1e-4)
