"""Fast-dLLM v2 against `transformers` under an explicit block-causal mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.drive import PAGE, Family
from tests.support.engine import answers_of_child, engine, greedy
from tests.support.lifecycle import World, assert_unnoticed
from tests.support.reference_fast_dllm import MASK, Answer, Reference, random_checkpoint
from tests.support.sdar_requests import MARGIN, assert_exact
from vllm_dllm.engine.slots import Phase
from vllm_dllm.vllm_seams.registration import RefusedError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Tokens of the prompt and tokens to generate. With blocks of 32 the answers of 31, 64 and 96 end
# with a boundary token, and 160 + 32 and 191 + 1 fill the context.
SHAPES = (
    *((1, 40), (7, 26), (16, 17), (31, 2), (32, 1), (33, 32), (40, 30), (48, 49), (63, 34)),
    *((64, 33), (65, 3), (80, 17), (95, 35), (96, 65), (97, 40), (127, 8), (128, 64)),
    *((160, 32), (191, 1)),
)
SETTINGS: tuple[tuple[float, int | None], ...] = ((1.0, None), (0.5, None), (0.2, None), (0.3, 3))
CONTEXT: dict[str, Any] = {"max_model_len": 192}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "block_size": PAGE}
SYNC: dict[str, Any] = {"additional_config": {"dllm": {"execution": "sync"}}}
# So few pages that running requests take them from each other.
FEW: dict[str, Any] = {"num_gpu_blocks_override": 10, "block_size": PAGE}
AHEAD: dict[str, Any] = {"async_scheduling": True}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a step ahead": AHEAD,
    "sync": SYNC,
    "sync, a step ahead": AHEAD | SYNC,
    # Chunks of a prompt, and what is cached is read again the second time.
    "chunks": CHUNKS,
    "chunks, a step ahead": AHEAD | CHUNKS,
    "preempted": FEW,
    "preempted, a step ahead": AHEAD | FEW,
    "preempted, sync, a step ahead": AHEAD | FEW | SYNC,
    "last commits": {"additional_config": {"dllm": {"skip_last_commit": False}}},
    "no early stop": {"additional_config": {"dllm": {"eos_early_stop": False}}},
}
QUICK = ("plain", "preempted, a step ahead")
# Requests that end early, at a boundary token; so does one inside a block.
BOUNDARY = (7, 13)


def prompt(number: int, length: int) -> list[int]:
    tokens = [(37 * i * i + 11 * i + number) % 290 for i in range(1, length + 1)]
    if number % 3 == 0:
        tokens[length // 2] = MASK  # an ordinary token in a prompt
    return tokens


def setting(number: int, block: int) -> tuple[float, int]:
    threshold, part = SETTINGS[number % len(SETTINGS)]
    return threshold, part or min(8, block // 2)


def requests(model: Path, block: int) -> tuple[list[Answer], list[int], list[dict[str, Any]]]:
    """The answers that are wanted, those that no other order of summation may change, and what is
    asked."""
    reference, stops = Reference(model), dict[int, int]()
    wanted = [
        reference.generate(prompt(n, length), count, *setting(n, block))
        for n, (length, count) in enumerate(SHAPES)
    ]
    first = [
        (n, at)
        for n, answer in enumerate(wanted)
        for at, token in enumerate(answer.tokens)
        if token not in answer.tokens[:at]
    ]
    inside = next((n, at) for n, at in first if at > 4 and at not in wanted[n].boundaries)
    for n in BOUNDARY:
        stops[n] = next(at for m, at in first if m == n and at in wanted[n].boundaries)
    stops[inside[0]] = inside[1]
    for n, at in stops.items():
        stops[n] = wanted[n].tokens[at]
        del wanted[n].tokens[at + 1 :]
    assert len(stops) == 3
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= len(SHAPES) - 2, "too many near ties to compare"
    asked = []
    for n, (length, count) in enumerate(SHAPES):
        threshold, part = setting(n, block)
        options = {"diffusion_threshold": threshold, "diffusion_sub_block_length": part}
        if (threshold, part) == (1.0, 8):
            options = {}
        asked.append(
            {
                "prompt": prompt(n, length),
                "max_tokens": count,
                "stop": [stops[n]] if n in stops else [],
                "options": options,
            }
        )
    return wanted, robust, asked


@pytest.mark.parametrize(
    ("block", "names"),
    [
        pytest.param(32, QUICK, id="32-quick"),
        *(
            pytest.param(block, tuple(ENGINES), id=f"{block}", marks=pytest.mark.long)
            for block in (32, 8, 4)
        ),
    ],
)
def test_answers_equal_transformers(tmp_path: Path, block: int, names: tuple[str, ...]) -> None:
    """Token for token, alone and together, however the requests are scheduled."""
    model = random_checkpoint(tmp_path, block, tied=block == 8)
    wanted, robust, asked = requests(model, block)
    options = [CONTEXT | ENGINES[name] for name in names]
    found = answers_of_child("sdar_child", model, block, asked, options)
    for name, one in zip(names, found, strict=True):
        assert one["model"] == "Fast_dLLM_QwenForCausalLM"
        assert one["length"] == block
        assert_exact(name, one, wanted, robust)


@pytest.mark.long
@pytest.mark.parametrize("block", [32, 4])
def test_two_ranks_equal_transformers(tmp_path: Path, block: int) -> None:
    """Token for token: partial sums over tensor-parallel ranks."""
    model = random_checkpoint(tmp_path, block)
    wanted, robust, asked = requests(model, block)
    names = ("plain", "preempted, a step ahead")
    options = [CONTEXT | ENGINES[name] | {"tensor_parallel_size": 2} for name in names]
    found = answers_of_child("sdar_ranks_child", model, asked, options)
    for name, one in zip(names, found, strict=True):
        assert_exact(name, one, wanted, robust)


# The victim's phases: whether its prompt ends with a block, which canvas (-1 is that last block of
# the prompt, read again), and what comes next.
PHASES = {
    "mid-prefill": (0, None),
    "prompt-again": (0, (-1, Phase.COMMIT, None)),
    "boundary-known": (0, (0, Phase.DENOISE, 0)),
    "tail": (5, (0, Phase.DENOISE, 0)),
    "denoise": (0, (0, Phase.DENOISE, 2)),
    "commit": (5, (0, Phase.COMMIT, None)),
    "second-canvas": (0, (1, Phase.DENOISE, 0)),
    "second-canvas-denoise": (0, (1, Phase.DENOISE, 2)),
}


@pytest.fixture(scope="module")
def world_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), block=8)


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_request_that_is_hit_in_a_phase(
    world_model: Path, asynchronous: bool, streams: bool
) -> None:
    """A preemption, a reset or an abort in every phase changes no token."""
    reference = Reference(world_model)
    family = Family("fast", world_model, 8, True, range(5, 290), {}, {}, {})
    options = {"diffusion_stream_prefix": True} if streams else {}
    lengths = {"near": 13, "far": 32, "newcomer": 16}
    budget = {"max_num_seqs": 3, "max_num_batched_tokens": 32, **CONTEXT}
    with family.start(async_scheduling=asynchronous, **budget) as running:
        for name, (tail, phase) in PHASES.items():
            prompts = {who: prompt(1, length) for who, length in lengths.items()}
            prompts["victim"] = prompt(2, 64 + tail)
            asked = {
                who: (each, greedy(29, ignore_eos=True, **options)) for who, each in prompts.items()
            }
            wanted = {who: reference.generate(each, 29) for who, each in prompts.items()}
            assert min(one.margin for one in wanted.values()) > MARGIN
            alone = {who: one.tokens for who, one in wanted.items()}
            for event in ("preempt", "reset", "abort", "abort-while-preempted"):
                world = World(family, running, asked, alone, asynchronous)
                driver = world.begin()

                def reached(driver: Any = driver, phase: Any = phase) -> bool:
                    request = driver.request("victim")
                    if phase is None:
                        return 0 < request.num_computed_tokens < request.num_prompt_tokens
                    canvas, kind, step = phase
                    found = driver.canvas("victim")
                    return (
                        found is not None
                        and found[:2] == (kind, 64 + 8 * canvas)
                        and step in (None, found[2])
                        and request.num_computed_tokens >= 64
                    )

                driver.until(reached)
                assert driver.slot("victim") is not None, (name, event)
                assert_unnoticed(world, driver, event)


def test_drawn_answers_have_greedy_boundary_tokens(tmp_path: Path) -> None:
    """Whatever the temperature, alone and beside others; other tokens are drawn."""
    model = random_checkpoint(tmp_path, block=8)
    reference = Reference(model)
    params = [
        SamplingParams(max_tokens=26, ignore_eos=True, seed=n, temperature=t, top_p=p, top_k=k)
        for n, (t, p, k) in enumerate([(1.2, 1.0, 0), (1.2, 0.9, 0), (0.8, 1.0, 20), (0.0, 1.0, 0)])
    ]
    prompts = [prompt(n, length) for n, length in enumerate((16, 21, 8, 40))]
    with engine(model, 8, diffusion_config=None, **CONTEXT) as running:
        together = running.generate(prompts, params)
        alone = [running.generate([a], [b])[0] for a, b in zip(prompts, params, strict=True)]
    assert together == alone
    likeliest = [0, 0]
    for asked, (tokens, _), one in zip(prompts, together, params, strict=True):
        every = [*asked, *tokens]
        for n in range(len(asked), len(every)):
            if n % 8 == 0:
                row = reference.logits(every[:n])[-1]
                row[MASK] = -torch.inf
                assert every[n] == int(row.argmax())
        if one.temperature > 0:
            rows = reference.logits(every)
            behind = [n for n in range(len(asked), len(every)) if n % 8]
            likeliest[0] += sum(every[n] == int(rows[n - 1].argmax()) for n in behind)
            likeliest[1] += len(behind)
    assert likeliest[0] < 0.8 * likeliest[1]


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    """At start-up, and by name in a request."""
    model = random_checkpoint(tmp_path, block=8)
    from vllm.engine.arg_utils import EngineArgs

    def started(**options: Any) -> Any:
        return EngineArgs(model=str(model), **options).create_engine_config()

    for options, reason in (
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"additional_config": {"dllm": {"fused_commit": "on"}}}, "fused_commit=on: impossible"),
    ):
        with pytest.raises(RefusedError, match=reason):
            started(**options)
    served = started().model_config.dllm
    assert (served.length, served.mask_token, served.choose().algorithm.name) == (
        *(8, MASK),
        "SubBlocks",
    )
    assert served.excludes == {"constraints", "logprobs", "traces", "row_options"}
    assert started(hf_overrides={"bd_size": 4}).model_config.dllm.length == 4
    assert started(hf_overrides={"mask_token_id": 7}).model_config.dllm.mask_token == 7
    assert started(diffusion_config={"canvas_length": 16}).model_config.dllm.length == 16
