"""Algorithms that verify drafts: against plain loops, and whatever else happens beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from examples.tiny.llada2 import load
from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder, Example
from tests.support.block_one_chain import Model, chain, llada2, sdar
from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.reference_sdar import MASK, Reference, random_checkpoint
from vllm_dllm.families.base import Family
from vllm_dllm.families.fast_dllm.family import FastDLLM
from vllm_dllm.families.llada2_2.family import LLaDA22
from vllm_dllm.families.nemotron_labs_diffusion.family import NemotronLabsDiffusion
from vllm_dllm.families.served import verifies_drafts
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings
from vllm_dllm.vllm_seams.registration import RefusedError

pytestmark = pytest.mark.engine

DRAFTS: dict[str, Any] = {
    "async_scheduling": True,
    "additional_config": {"dllm": {"algorithm": "SelfSpeculative"}},
}
EXACT = {"diffusion_algorithm": "SelfSpeculativeExact"}
# Every draft is verified, and seldom accepted in whole.
ALWAYS = {"diffusion_least_score": -100.0, "diffusion_ratio_power": 3.0}
# Decisions closer than this may legitimately fall differently in another summation order.
MARGIN = 1e-4
MOST = 40  # tokens of an answer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("sdar"), experts=False, block=4)


def prompts(lengths: range) -> list[list[int]]:
    return [[(7 * i + n) % 290 + 2 for i in range(n)] for n in lengths]


@pytest.mark.parametrize(
    ("name", "per_task"),
    [
        ("sdar", 2),
        pytest.param("sdar", 29, marks=pytest.mark.long),
        pytest.param("llada2", 29, marks=pytest.mark.long),
    ],
)
def test_the_exact_form_is_the_chain(name: str, per_task: int) -> None:
    """Every answer of a trained model, in one batch."""
    model: Model
    if name == "sdar":
        tokenizer, model, path = sdar_tokenizer(), sdar(Reference(TINY_SDAR)), TINY_SDAR
        ends = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"))
        encoder, block = Encoder(tokenizer, ends[1]), 4
    else:
        tokenizer, model, path = llada2_tokenizer(), llada2(load(TINY_LLADA2)), TINY_LLADA2
        encoder, block, ends = Encoder(tokenizer), 32, (tokenizer.eos_token_id,)
    asked: list[Example] = [encoder(problem) for problem in held_out_set(per_task)]
    wanted = [chain(model, e.prompt, block, tokenizer.mask_token_id, ends, MOST) for e in asked]
    with engine(path, block, **DRAFTS) as running:
        params = [greedy(MOST, **EXACT)] * len(asked)
        found = running.generate([example.prompt for example in asked], params)
        running.assert_idle()
    different = [n for n, (tokens, _) in enumerate(found) if tokens != wanted[n].tokens]
    assert not different, [(asked[n].problem, wanted[n].margin) for n in different]


# The loop ends at the last token that the context holds.
LIMITS: dict[str, Any] = {"max_model_len": 64, "diffusion_config": None}


def test_the_context_is_filled_to_the_last_token(small: Path) -> None:
    """With random weights, where most drafts are wrong, from every place in a block and a page."""
    model, asked = sdar(Reference(small)), prompts(range(1, 63, 6))
    wanted = [chain(model, one, 4, MASK, (), 64 - len(one)) for one in asked]
    robust = [n for n, one in enumerate(wanted) if one.margin > MARGIN]
    assert len(robust) >= len(asked) - 3
    with engine(small, 4, **(DRAFTS | LIMITS)) as running:
        found = running.generate(asked, [greedy(100, ignore_eos=True, **EXACT)] * len(asked))
        running.assert_idle()
    assert [n for n in robust if found[n][0] != wanted[n].tokens] == []


@pytest.mark.parametrize("family", [LLaDA22, FastDLLM, NemotronLabsDiffusion])
def test_other_families_cannot_read_drafts(family: type[Family]) -> None:
    server = DllmSettings(algorithm="SelfSpeculative")
    with pytest.raises(SettingsError, match=rf"dllm\.algorithm: .* {family.__name__} cannot read"):
        verifies_drafts(family(), server)


@pytest.mark.parametrize("name", ["SelfSpeculative", "SelfSpeculativeExact"])
def test_another_server_refuses_them(name: str) -> None:
    asked = Served("mask", "LowConfidence", DllmSettings())
    with pytest.raises(SettingsError, match=f"start it with dllm.algorithm={name}, or choose"):
        asked.choose({"algorithm": name})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fused_commit": "off"}, "it reads windows of two blocks, and dllm.fused_commit is off"),
        ({"skip_last_commit": False}, "impossible, because skip_last_commit is off"),
    ],
)
def test_settings_that_do_not_fit(small: Path, options: dict[str, Any], named: str) -> None:
    dllm = {"algorithm": "SelfSpeculative"} | options
    with (
        pytest.raises(RefusedError, match=named),
        engine(small, 4, additional_config={"dllm": dllm}, diffusion_config=None),
    ):
        pass


# Ways to run the same requests; none may change a token.
WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {"async_scheduling": False},
    "small pool": {"kv_cache_memory_bytes": 3 << 18, "block_size": 32, "max_model_len": 256},
    "chunks": {"max_num_batched_tokens": 32},
    "sync": {"additional_config": {"dllm": {"algorithm": "SelfSpeculative", "execution": "sync"}}},
}
KINDS: dict[str, dict[str, Any]] = {
    "always": ALWAYS,
    "scored": {"diffusion_entropy_weight": 8.0, "diffusion_cost": 2.0, "diffusion_threshold": 0.5},
    "exact": EXACT,
    "another": {"diffusion_algorithm": "LowConfidence"},
    "streamed": ALWAYS | {"diffusion_stream_prefix": True},
    "exact, streamed": EXACT | {"diffusion_stream_prefix": True},
    "logprobs": ALWAYS | {"logprobs": 1},
    "traced": ALWAYS | {"diffusion_trace": True, "diffusion_return_step_maps": True},
    "penalty": ALWAYS | {"frequency_penalty": 1.0},
}


def every_kind(running: Engine, asked: list[list[int]]) -> dict[str, list[Any]]:
    """All prompts in every kind, in one batch."""
    kinds = [kind for kind in KINDS for _ in asked]
    params = [greedy(60, ignore_eos=True, **KINDS[kind]) for kind in kinds]
    got = running.generate(asked * len(KINDS), params)
    return {kind: got[n * len(asked) : (n + 1) * len(asked)] for n, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def asked_and_alone(small: Path) -> tuple[list[list[int]], dict[str, list[Any]]]:
    """Prompts, and their answers when nothing runs beside them."""
    asked = prompts(range(9, 80, 23))
    with engine(small, 4, **(DRAFTS | {"diffusion_config": None})) as running:
        alone = {
            kind: [
                running.generate([one], [greedy(60, ignore_eos=True, **options)])[0]
                for one in asked
            ]
            for kind, options in KINDS.items()
        }
        running.assert_idle()
    return asked, alone


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(way, marks=() if way == "small pool" else pytest.mark.long) for way in WAYS
    ],
)
def way(
    request: pytest.FixtureRequest, small: Path, asked_and_alone: Any
) -> Iterator[tuple[str, Engine]]:
    """An engine; two cannot run at a time, so the other answers come before."""
    options = DRAFTS | {"diffusion_config": None} | WAYS[request.param]
    with engine(small, 4, **options) as running:
        yield request.param, running


def test_nothing_changes_an_answer(way: tuple[str, Engine], asked_and_alone: Any) -> None:
    """Mixed batches, the prefix cache, preemption and streaming."""
    name, running = way
    asked, alone = asked_and_alone
    preemptions = count_calls(running.scheduler, "_preempt_request")
    for _ in range(2):  # the second time prompts come out of the cache
        together = every_kind(running, asked)
        for kind in KINDS:
            assert together[kind] == alone[kind], kind
        running.assert_idle()
    assert (len(preemptions) >= 4) == (name == "small pool")


def test_what_is_only_seen_changes_nothing(asked_and_alone: Any) -> None:
    _, alone = asked_and_alone
    for kind in ("streamed", "logprobs", "traced"):
        assert alone[kind] == alone["always"], kind
    assert alone["exact, streamed"] == alone["exact"]
    assert alone["always"] != alone["another"], "nothing was verified"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs cannot be combined with"),
        ({"temperature": 0.7}, "temperature=0.7 is not supported by SelfSpeculative"),
    ],
)
def test_what_they_exclude(way: tuple[str, Engine], options: dict[str, Any], named: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = greedy(4)
    params.temperature = options.get("temperature", 0.0)
    if "structured_outputs" in options:
        params.structured_outputs = StructuredOutputsParams(**options["structured_outputs"])
    with pytest.raises(VLLMValidationError, match=named):
        way[1].generate([[5, 6]], [params])
