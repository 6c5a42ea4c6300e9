"""Families against their references: token for token, however requests are scheduled.

LLaDA2 is compared with golden vectors (`test_golden.py`), and DiffusionGemma with the class of
`transformers` (`test_gemma.py`).
"""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference_diffcoder, reference_fast_dllm
from tests.support.child import in_child
from tests.support.engine import engine, greedy, settings
from tests.support.families import (
    CONTEXT,
    FAMILIES,
    Asked,
    assert_equal,
    assert_served,
    prompt,
    requests,
)
from tests.support.reference import MARGIN, Answer
from tests.support.reference_llada22 import Reference22
from vllm_dllm.vllm_seams.registration import RefusedError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Family, block length and ways to schedule: what each may get wrong that the others may not.
QUICK: dict[tuple[str, int], tuple[str, ...]] = {
    ("sdar", 4): ("plain", "a step ahead", "two blocks", "two blocks, preempted"),
    ("diffcoder", 4): ("a step ahead",),
    ("nemotron", 8): ("plain", "preempted, a step ahead"),
    ("fast-dllm", 32): ("plain", "preempted, a step ahead"),
    ("llada2.2", 8): ("plain", "two blocks, preempted"),
}
BLOCKS = {
    "sdar": (4, 8, 32),
    "sdar with experts": (4, 8, 32),
    "diffcoder": (4, 8),
    "nemotron": (5, 8, 32),
    "fast-dllm": (4, 8, 32),
    "llada2.2": (8, 32),
}


def cases() -> list[Any]:
    quick = [pytest.param(*case, ways, id=f"{case[0]}-{case[1]}") for case, ways in QUICK.items()]
    every = [
        pytest.param(
            *(family, block, tuple(FAMILIES[family].ways)),
            id=f"{family}-{block}-every-way",
            marks=pytest.mark.long,
        )
        for family, blocks in BLOCKS.items()
        for block in blocks
    ]
    return quick + every


@pytest.mark.parametrize(("family", "block", "ways"), cases())
def test_equals_the_reference(
    tmp_path: Path, family: str, block: int, ways: tuple[str, ...]
) -> None:
    FAMILIES[family].make(tmp_path, block)
    asked = requests(family, tmp_path, block)
    for way in ways:
        assert_served(tmp_path, block, family, way, asked)


def test_every_part_of_the_editing_rule_is_used(tmp_path: Path) -> None:
    """Else the answers of LLaDA2.2 would say less than they seem to."""
    family = FAMILIES["llada2.2"]
    family.make(tmp_path, 8)
    reference = Reference22(tmp_path)
    for n, rule in enumerate(family.rules * 2):
        reference.generate(prompt(n, 9 + n, family.odd), 16, rule)
    parts = {"delete", "split", "cut", "escape", "last round", "unchanged", "too few are sure"}
    assert set(+reference.events) >= parts | {"other than an edit"}


# How checkpoints of Stable-DiffCoder may differ from the published ones.
VARIANTS: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "stretched": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "another mask": {"mask_token_id": 299},
    "first release": {"first_release": True},
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_diffcoder(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference_diffcoder.random_checkpoint(tmp_path, **VARIANTS[variant])
    asked = requests("diffcoder", tmp_path, reference_diffcoder.BLOCK)
    if variant == "first release":
        served = replace(FAMILIES["diffcoder"], model="SeedDiffcoderForCausalLM")
        monkeypatch.setitem(FAMILIES, "diffcoder", served)
    for way in QUICK["sdar", 4]:
        assert_served(tmp_path, reference_diffcoder.BLOCK, "diffcoder", way, asked)


@pytest.mark.long
def test_an_end_inside_a_block(tmp_path: Path) -> None:
    """The checkpoint's own end token, with masks of the same block behind it."""
    model = reference_diffcoder.random_checkpoint(tmp_path / "model")
    reference, rule = reference_diffcoder.Reference(model), reference_diffcoder.Rule()
    prompts = [prompt(n, 5 + n) for n in range(12)]
    end = reference.generate(prompts[0], 10, rule).tokens[5]
    ended = reference_diffcoder.random_checkpoint(tmp_path / "ended", eos_token_id=end)
    wanted = [reference.generate(tokens, 30, rule, (end,)) for tokens in prompts]
    assert any(1 < len(answer.tokens) < 30 for answer in wanted)
    with engine(ended, 4, diffusion_config=None, async_scheduling=True) as running:
        found = running.generate(prompts, [greedy(30)] * len(prompts))
    for (tokens, _), answer in zip(found, wanted, strict=True):
        assert answer.margin < MARGIN or tokens == answer.tokens


SPREAD: dict[str, Any] = {
    "enable_expert_parallel": True,
    "worker_extension_cls": "tests.support.spread_experts.Recorder",
}
# Partial sums over ranks, stages that see no logits, and their windows.
RANKED = [
    (family, block, axis)
    for family, block in (("sdar", 4), ("sdar with experts", 8), ("diffcoder", 4), ("llada2.2", 8))
    for axis in ("tensor", "pipeline")
] + [("nemotron", 5), ("nemotron", 8), ("fast-dllm", 32), ("fast-dllm", 4)]


@pytest.mark.long
@pytest.mark.parametrize("case", RANKED, ids=str)
def test_two_ranks_equal_the_reference(tmp_path: Path, case: tuple[Any, ...]) -> None:
    name, block, *axis = case
    family = FAMILIES[name]
    family.make(tmp_path, block)
    two = {f"{axis[0] if axis else 'tensor'}_parallel_size": 2}
    ways = {way: options | two for way, options in family.ways.items() if way != "compiled"}
    on_ranks(tmp_path, name, block, ways)


@pytest.mark.long
@pytest.mark.parametrize("block", [4, 8])
def test_spread_experts_equal_the_reference(block: int, tmp_path: Path) -> None:
    """With half of the experts on each of two ranks, instead of a part of every expert.

    On the CPU that needs another kernel, see `tests.support.spread_experts`.
    """
    FAMILIES["sdar with experts"].make(tmp_path, block)
    ways = {"spread": SPREAD | {"tensor_parallel_size": 2}}
    (found,) = on_ranks(tmp_path, "sdar with experts", block, ways)
    assert found["held experts"] == [[4], [4]]


def has_window(worker: Any) -> bool:
    """Whether a rank reads two blocks in a step."""
    return worker.model_runner.model_state.parts.window is not None


def held_experts(worker: Any) -> list[int]:
    """How many experts a layer of a rank holds; one number, if all layers agree."""
    named = worker.model_runner.model.named_parameters()
    return sorted({len(weight) for name, weight in named if name.endswith("w13_weight")})


def by_ranks(model: str, asked: list[Any], ways: list[dict[str, Any]]) -> Iterator[Any]:
    """What engines of several ranks make of the requests, twice, in a process of its own."""
    from vllm import LLM

    prompts = [{"prompt_token_ids": prompt} for prompt, *_ in asked]
    params = [Asked(*given, Answer()).params() for given in asked]
    # The checkpoint alone says how long its blocks are.
    own = {"diffusion_config": None, "max_model_len": CONTEXT, "disable_log_stats": False}
    for options in ways:
        if extension := options.get("worker_extension_cls"):
            importlib.import_module(extension.rpartition(".")[0])  # here, too, not in workers alone
        llm = LLM(model=model, **(settings(0) | own | options))
        windows, held = llm.collective_rpc(has_window), llm.collective_rpc(held_experts)
        found = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        yield {
            "answers": [[list(output.outputs[0].token_ids) for output in once] for once in found],
            "two blocks": windows,
            "held experts": held,
            "preemptions": preempted[0],
        }


def on_ranks(model: Path, family: str, block: int, ways: dict[str, Any]) -> list[dict[str, Any]]:
    """What engines of several ranks say, whose answers are the reference's."""
    asked = requests(family, model, block)
    given = [(one.prompt, one.max_tokens, one.stop, one.options) for one in asked]
    found = in_child(by_ranks, model, given, list(ways.values()))
    for way, served in zip(ways, found, strict=True):
        for tokens in served["answers"]:
            assert_equal(way, asked, tokens)
        assert served["two blocks"] == [way.startswith("two blocks")] * 2, way
        assert (served["preemptions"] > 0) == ("preempted" in way), way
    return found


def test_drawn_answers_have_greedy_boundary_tokens(tmp_path: Path) -> None:
    """Fast-dLLM's, whatever the temperature, alone and beside others; other tokens are drawn."""
    from vllm import SamplingParams

    model = reference_fast_dllm.random_checkpoint(tmp_path, block=8)
    reference = reference_fast_dllm.Reference(model)
    params = [
        SamplingParams(max_tokens=26, ignore_eos=True, seed=n, temperature=t, top_p=p, top_k=k)
        for n, (t, p, k) in enumerate([(1.2, 1.0, 0), (1.2, 0.9, 0), (0.8, 1.0, 20), (0.0, 1.0, 0)])
    ]
    prompts = [prompt(n, length) for n, length in enumerate((16, 21, 8, 40))]
    with engine(model, 8, diffusion_config=None, max_model_len=CONTEXT) as running:
        together = running.generate(prompts, params)
        alone = [running.generate([a], [b])[0] for a, b in zip(prompts, params, strict=True)]
    assert together == alone
    likeliest, drawn = 0, 0
    for asked, (tokens, _), one in zip(prompts, together, params, strict=True):
        every = [*asked, *tokens]
        rows = reference.logits(every)
        rows[:, reference.mask] = -math.inf
        for n in range(len(asked), len(every)):
            if n % 8 == 0:
                row = reference.logits(every[:n])[-1]
                row[reference.mask] = -math.inf
                assert every[n] == int(row.argmax())
            elif one.temperature > 0:
                likeliest += every[n] == int(rows[n - 1].argmax())
                drawn += 1
    assert likeliest < 0.8 * drawn


def test_what_cannot_work_with_fast_dllm_is_refused(tmp_path: Path) -> None:
    """At start-up, and by name in a request."""
    model = reference_fast_dllm.random_checkpoint(tmp_path, block=8)
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
        *(8, reference_fast_dllm.MASK),
        "SubBlocks",
    )
    assert served.excludes == {"constraints", "logprobs", "traces", "row_options"}
    assert started(hf_overrides={"bd_size": 4}).model_config.dllm.length == 4
    assert started(hf_overrides={"mask_token_id": 7}).model_config.dllm.mask_token == 7
    assert started(diffusion_config={"canvas_length": 16}).model_config.dllm.length == 16
