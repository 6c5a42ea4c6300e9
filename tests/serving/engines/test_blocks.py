"""Multi-block decoding: exact to a plain loop however it is scheduled, and never in the way."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import StructuredOutputsParams as Constraint

from tests.support.checkpoints import TINY, TINY_LLADA2
from tests.support.drive import Driver
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.families import dllm as settings
from tests.support.long import long_but
from tests.support.reference import MARGIN, Answer, Rule
from tests.support.reference_sdar import END, VOCABULARY, Reference, random_checkpoint
from vllm_dllm.engine.constraints import CanvasStarts

pytestmark = pytest.mark.engine

LENGTH, BLOCKS, CONTEXT = 4, 4, 192
THRESHOLDS = (0.15, 0.4, 0.9)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 10, "block_size": 32}


def dllm(**others: Any) -> dict[str, Any]:
    return settings(blocks=BLOCKS, **others)


ENGINES: dict[str, dict[str, Any]] = {
    "plain": dllm(),
    "a step ahead": {"async_scheduling": True, **dllm()},
    "sync": dllm(execution="sync"),
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3, "block_size": 32, **dllm()},
    "preempted": SMALL | {"async_scheduling": True, **dllm()},
    "preempted, sync": SMALL | dllm(execution="sync"),
    "a step ahead, sync": {"async_scheduling": True, **dllm(execution="sync")},
    "all open": dllm(blocks_open_at=0),
    "commits": dllm(skip_last_commit=False, eos_early_stop=False),
    "compiled": {"enforce_eager": False, **dllm()},
}
QUICK = ("plain", "chunks", "preempted", "preempted, sync")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("sdar"), experts=False, block=LENGTH)


@pytest.fixture(scope="module")
def asked() -> list[tuple[list[int], float, int, bool]]:
    """(prompt, threshold, max_tokens, ignore_eos): ends in every block, and at the context's."""
    draw = random.Random(3)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(2, VOCABULARY - 1) for _ in range(length)]

    lengths = [draw.randrange(1, 70) for _ in range(26)]
    found = [(prompt(n), draw.choice(THRESHOLDS), m, True) for m, n in enumerate(lengths, 1)]
    found += [(prompt(20 + n), 0.15, 60, False) for n in range(6)]
    found += [(prompt(CONTEXT - n), 0.15, 1000, True) for n in (1, 3, 7, 18, 23)]
    return found


@pytest.fixture(scope="module")
def wanted(model: Path, asked: Any) -> list[Answer]:
    return expected(model, asked, most=BLOCKS)


def expected(model: Path, asked: Any, most: int, tenths: int = 1) -> list[Answer]:
    reference = Reference(model)
    rules = {t: Rule(threshold=t, blocks=BLOCKS, most=most, tenths=tenths) for t in THRESHOLDS}
    return [
        reference.generate(prompt, tokens, rules[threshold], () if ignores else (END,), CONTEXT)
        for prompt, threshold, tokens, ignores in asked
    ]


def params(asked: Any, **options: Any) -> list[Any]:
    return [
        greedy(tokens, ignore_eos=ignores, diffusion_threshold=threshold, **options)
        for _, threshold, tokens, ignores in asked
    ]


def assert_equal(name: str, got: list[Any], wanted: list[Answer]) -> None:
    robust = [i for i, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= 0.8 * len(wanted), "too many near ties"
    different = [i for i in robust if got[i][0] != wanted[i].tokens]
    assert not different, (name, different)


@pytest.mark.parametrize("name", long_but(QUICK, ENGINES))
def test_equals_the_plain_loop(model: Path, asked: Any, wanted: list[Answer], name: str) -> None:
    prompts = [prompt for prompt, *_ in asked]
    if name == "all open":
        wanted = expected(model, asked, most=BLOCKS, tenths=0)
    own = {"diffusion_config": None, "max_model_len": CONTEXT}
    with engine(model, LENGTH, **(own | ENGINES[name])) as running:
        preempted = count_calls(running.scheduler, "_preempt_request")
        for again in range(2):  # the second time prompts come out of the cache
            assert_equal(f"{name} {again}", running.generate(prompts, params(asked)), wanted)
        streams = running.generate(prompts, params(asked, diffusion_stream_prefix=True))
        assert_equal(f"{name}, streamed", streams, wanted)
        assert bool(preempted) == name.startswith("preempted")
        if name == "plain":
            alone = [
                running.generate([p], [q])[0] for p, q in zip(prompts, params(asked), strict=True)
            ]
            assert_equal("alone", alone, wanted)
            two = expected(model, asked, most=2)
            assert_equal("two", running.generate(prompts, params(asked, diffusion_blocks=2)), two)
        running.assert_idle()


def changed(options: dict[str, Any]) -> list[tuple[list[int], Any]]:
    """Prompts and parameters of requests with constraints, penalties and both."""
    draw = random.Random(1)
    # More states than a canvas is decoded with, even without calls.
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randrange(9, 24))) for _ in range(300)]
    record = {"n": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": words}}}
    every: list[dict[str, Any]] = [
        {},
        {"structured_outputs": Constraint(regex="([a-f]{3} [0-9]{2}[,.] ){2,6}")},
        {"structured_outputs": Constraint(json={"properties": record, "required": ["n", "tags"]})},
        {"structured_outputs": Constraint(json_object=True)},
        {"structured_outputs": Constraint(choice=words)},
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"structured_outputs": Constraint(regex="[a-z ]{10,60}"), "repetition_penalty": 1.5},
        {"frequency_penalty": -0.6, "min_tokens": 12},
    ]
    found = []
    for threshold in (0.3, 0.95):
        for one in every:
            prompt = [draw.randrange(20, 100) for _ in range(draw.randrange(3, 40))]
            pace = {"diffusion_threshold": threshold, **options}
            found.append((prompt, greedy(draw.choice((40, 50, 64)), **one, **pace)))
    return found


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada2-blocks"])
def test_one_open_block_equals_a_server_without(name: str) -> None:
    """Also where the constraint of a block comes late, as on a GPU, and after preemptions."""
    prompts = [prompt for prompt, _ in changed({})]
    with engine(TINY / name, 8, diffusion_config=None) as running:
        plain = running.generate(prompts, [asked for _, asked in changed({})])
    with engine(TINY / name, 8, diffusion_config=None, **dllm()) as running:
        one = [asked for _, asked in changed({"diffusion_blocks": 1})]
        assert running.generate(prompts, one) == plain
        running.assert_idle()
        constraints = running.runner.model_state.parts.constraints
        constraints.starts = CanvasStarts(16, torch.device("cpu"), late=1)
        assert running.generate(prompts, one) == plain
        driver = Driver(running)
        streams = changed({"diffusion_blocks": 1, "diffusion_stream_prefix": True})
        for n, (prompt, asked) in enumerate(streams):
            driver.add(f"{n}", prompt, asked)
        while running.scheduler.requests:
            for _ in range(7):
                driver.step()
            assert running.core.reset_prefix_cache(reset_running_requests=True)
        tokens = driver.finish()
        assert [tokens[f"{n}"] for n in range(len(prompts))] == [answer for answer, _ in plain]
        four = running.generate(prompts, [asked for _, asked in changed({})])
        assert four != plain
        assert {reason for _, reason in four} <= {"stop", "length"}


def outputs(running: Engine, prompt: list[int], params: Any) -> list[list[int]]:
    """The tokens of each message, one after another."""
    params.output_kind = RequestOutputKind.DELTA
    core, found = running.llm.llm_engine, []
    core.add_request("one", {"prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        found += [list(output.outputs[0].token_ids) for output in core.step()]
    return [tokens for tokens in found if tokens]


def test_passes_streams_and_constraints() -> None:
    """With trained weights: fewer passes, prefixes that leave early, and outputs that are valid."""
    pattern = "([a-f]{3} [0-9]{2}[,.] ){4,8}"
    with engine(TINY_LLADA2, 8, **dllm()) as running:
        passes = count_calls(running.runner.sampler.canvas_update, "plan")
        prompt, counts = list(range(60, 97)), {}
        answers = {}
        for blocks in (1, 4):
            passes.clear()
            asked = greedy(96, ignore_eos=True, diffusion_blocks=blocks, diffusion_threshold=0.5)
            answers[blocks] = running.generate([prompt], [asked])
            counts[blocks] = len(passes)
        assert counts[4] < counts[1]
        asked = greedy(96, ignore_eos=True, diffusion_threshold=0.5, diffusion_stream_prefix=True)
        parts = outputs(running, prompt, asked)
        assert [token for part in parts for token in part] == answers[4][0][0]
        assert len(parts) > 3  # canvases
        for temperature in (0.0, 1.0):
            asked = SamplingParams(
                temperature=temperature,
                seed=5,
                max_tokens=200,
                structured_outputs=Constraint(regex=pattern),
            )
            found = running.llm.generate(
                [{"prompt_token_ids": prompt}] * 3, [asked] * 3, use_tqdm=False
            )
            for output in found:
                assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text
                assert output.outputs[0].finish_reason == "stop"
        running.assert_idle()
