"""Families against their references: token for token, however requests are scheduled.

LLaDA2 is compared with golden vectors (`test_golden.py`), and DiffusionGemma with the class of
`transformers` (`test_gemma.py`).
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import (
    reference_diffcoder,
    reference_dream,
    reference_fast_dllm,
    reference_openpangu,
)
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
from tests.support.reference import MARGIN, Answer, Rule
from tests.support.reference_llada2 import Reference, random_checkpoint
from vllm_dllm.families.dream_reasoner import DreamReasoner

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Family, block length and ways to schedule: what each may get wrong that the others may not.
QUICK: dict[tuple[str, int], tuple[str, ...]] = {
    ("sdar", 4): ("plain", "a step ahead", "two blocks", "two blocks, preempted"),
    ("diffcoder", 4): ("a step ahead",),
    ("nemotron", 8): ("plain", "preempted, a step ahead"),
    ("fast-dllm", 32): ("plain", "preempted, a step ahead"),
    ("dream", 8): ("plain", "two blocks, preempted"),
    ("openpangu", 8): ("plain", "preempted, a step ahead"),
    ("llada2.2", 8): ("plain", "two blocks, preempted"),
    ("sdar-vl", 4): ("plain", "chunks", "two blocks, preempted"),
    ("nemotron-vlm", 8): ("chunks", "preempted, a step ahead"),
}
BLOCKS = {
    "sdar": (4, 8, 32),
    "sdar with experts": (4, 8, 32),
    "diffcoder": (4, 8),
    "nemotron": (5, 8, 32),
    "fast-dllm": (4, 8, 32),
    "dream": (16, 32),
    "openpangu": (5, 8, 32),
    "llada2.2": (8, 32),
    "sdar-vl": (4, 8, 32),
    "nemotron-vlm": (5, 8, 32),
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


# Half of the experts on each rank, instead of a part of every expert; on the CPU that needs
# another kernel, see `tests.support.spread_experts`.
SPREAD: dict[str, Any] = {
    "enable_expert_parallel": True,
    "worker_extension_cls": "tests.support.spread_experts.Recorder",
}
# Partial sums over ranks, stages that see no logits, and their windows.
RANKED = [
    (family, block, axis)
    for family, block in (
        ("sdar", 4),
        ("sdar with experts", 8),
        ("diffcoder", 4),
        ("dream", 8),
        ("llada2.2", 8),
    )
    for axis in ("tensor", "pipeline")
] + [
    *((name, block, "tensor") for name, block in (("nemotron", 5), ("nemotron", 8))),
    *((name, block, "tensor") for name, block in (("sdar-vl", 4), ("nemotron-vlm", 8))),
    *(("fast-dllm", block, "tensor") for block in (32, 4)),
    *(("openpangu", block, "tensor") for block in (5, 8)),
    *(("sdar with experts", block, "spread") for block in (4, 8)),
]


@pytest.mark.long
@pytest.mark.timeout(1800)  # an engine of two processes for each way
@pytest.mark.parametrize("case", RANKED, ids=str)
def test_two_ranks_equal_the_reference(tmp_path: Path, case: tuple[str, int, str]) -> None:
    name, block, axis = case
    family, two = FAMILIES[name], {"tensor_parallel_size": 2}
    family.make(tmp_path, block)
    if axis == "pipeline":
        two = {"pipeline_parallel_size": 2}
    ways = {way: options | two for way, options in family.ways.items() if way != "compiled"}
    if axis == "spread":
        ways = {"spread": SPREAD | two}
    asked = requests(name, tmp_path, block)
    given = [(one.prompt, one.max_tokens, one.stop, one.options, one.pictures) for one in asked]
    found = in_child(by_ranks, tmp_path, given, list(ways.values()))
    for way, served in zip(ways, found, strict=True):
        for tokens in served["answers"]:
            assert_equal(way, asked, tokens)
        assert served["two blocks"] == [way.startswith("two blocks")] * 2, way
        assert (served["preemptions"] > 0) == ("preempted" in way), way


def has_window(worker: Any) -> bool:
    """Whether a rank reads two blocks in a step."""
    return worker.model_runner.model_state.parts.window is not None


def by_ranks(model: str, asked: list[Any], ways: list[dict[str, Any]]) -> Iterator[Any]:
    """What engines of several ranks make of the requests, twice, in a process of its own."""
    from vllm import LLM

    of_child = [Asked(*given, Answer(), pictures) for *given, pictures in asked]
    prompts, params = [one.shown() for one in of_child], [one.params() for one in of_child]
    # The checkpoint alone says how long its blocks are.
    own = {"diffusion_config": None, "max_model_len": CONTEXT, "disable_log_stats": False}
    for options in ways:
        if extension := options.get("worker_extension_cls"):
            importlib.import_module(extension.rpartition(".")[0])  # here, too, not in workers alone
        llm = LLM(model=model, **(settings(0) | own | options))
        windows = llm.collective_rpc(has_window)
        found = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        yield {
            "answers": [[list(output.outputs[0].token_ids) for output in once] for once in found],
            "two blocks": windows,
            "preemptions": preempted[0],
        }


@pytest.mark.parametrize(
    "module", [reference_fast_dllm, reference_openpangu], ids=["aligned", "anchored"]
)
def test_drawn_answers_of_shifted_models(tmp_path: Path, module: Any) -> None:
    """Whatever the temperature, they are the same alone and beside others."""
    from vllm import SamplingParams

    model = module.random_checkpoint(tmp_path, block=8)
    params = [
        SamplingParams(max_tokens=26, ignore_eos=True, seed=n, temperature=t, top_p=p, top_k=k)
        for n, (t, p, k) in enumerate([(1.2, 1.0, 0), (1.2, 0.9, 0), (0.8, 1.0, 20), (0.0, 1.0, 0)])
    ]
    prompts = [prompt(n, length) for n, length in enumerate((16, 21, 8, 40))]
    with engine(model, 8, diffusion_config=None, max_model_len=CONTEXT) as running:
        together = running.generate(prompts, params)
        assert together == [
            running.generate([a], [b])[0] for a, b in zip(prompts, params, strict=True)
        ]
        plain = running.generate(prompts, [greedy(26, ignore_eos=True)] * 4)
    assert [a == b for a, b in zip(together, plain, strict=True)] == [False, False, False, True]


def test_draws_that_filters_leave_no_choice_are_certain(tmp_path: Path) -> None:
    """In openPangu-R a sub-block is then decided in one step, but for the block's first token."""
    model = reference_openpangu.random_checkpoint(tmp_path, block=8)
    reference, rule = reference_openpangu.Reference(model), reference_openpangu.Rule
    asked = [prompt(n, 11 + 9 * n) for n in range(4)]
    at_once = [
        reference.generate(one, 20, rule(threshold=0.0, sub_block_length=4)) for one in asked
    ]
    params = greedy(20, ignore_eos=True, diffusion_threshold=0.9, diffusion_sub_block_length=4)
    params.temperature, params.top_k, params.seed = 1.0, 1, 5
    with engine(model, 8, diffusion_config=None, max_model_len=CONTEXT) as running:
        found = running.generate(asked, [params] * 4)
    assert [tokens for tokens, _ in found] == [answer.tokens for answer in at_once]
    assert min(answer.margin for answer in at_once) > MARGIN


def test_ends_that_the_checkpoint_does_not_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DreamReasoner's, of which those outside of a vocabulary do not matter."""
    model = reference_dream.random_checkpoint(tmp_path, block=8)
    given = prompt(1, 13)
    answer = reference_dream.Reference(model).generate(given, 20, reference_dream.Rule()).tokens
    end = answer[9]
    monkeypatch.setattr(DreamReasoner, "end_tokens", (151645, end))
    params = [greedy(20), greedy(20, ignore_eos=True), greedy(20, min_tokens=answer.index(end) + 2)]
    with engine(model, 8, diffusion_config=None, max_model_len=CONTEXT) as running:
        short, whole, longer = running.generate([given] * 3, params)
    assert short == (answer[: answer.index(end) + 1], "stop")
    assert whole == (answer, "length")
    assert len(longer[0]) > len(short[0])


def test_openpangu_without_a_mask_is_autoregressive(tmp_path: Path) -> None:
    """By vLLM's own class, with the tokens of a causal pass after the other."""
    model = reference_openpangu.random_checkpoint(tmp_path, block=8, mask=None)
    reference, asked = (
        reference_openpangu.Reference(model),
        [prompt(n, 5 + 9 * n) for n in range(4)],
    )
    wanted = []
    for one in asked:
        known = list(one)
        for _ in range(12):
            known.append(int(reference.logits(known)[-1].argmax()))
        wanted.append(known[len(one) :])
    with engine(model, 0, diffusion_config=None, max_model_len=CONTEXT) as running:
        found = running.generate(asked, [greedy(12, ignore_eos=True)] * 4)
        assert type(running.runner.model).__module__ == "vllm.model_executor.models.openpangu"
    assert [tokens for tokens, _ in found] == wanted


# ---- Shapes of LLaDA2 that the golden vectors do not have

SHAPES: dict[str, dict[str, Any]] = {
    "hidden-is-not-heads-times-dim": {"block": 16, "hidden_size": 64, "num_attention_heads": 3,
                                      "num_key_value_heads": 1},
    "top-3-of-four-groups": {"block": 8, "num_experts": 16, "num_experts_per_tok": 3,
                             "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2},
    "mask-in-the-middle-tied-head": {"block": 32, "mask_token_id": 150, "tie_word_embeddings": True,
                                     "rope_theta": 10000},
}  # fmt: skip
LENGTHS = (1, 7, 16, 33, 50)


def prompts(vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, vocabulary - 5, (n,), generator=generator).tolist()  # noqa: E731
    return [draw(n) for n in LENGTHS]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_against_reference(shape: str, seed: int, tmp_path: Path) -> None:
    options = dict(SHAPES[shape])
    block = options.pop("block")
    config = random_checkpoint(tmp_path, seed, **options)
    vocabulary = config["vocab_size"]
    mask, end = config.get("mask_token_id", vocabulary - 1), vocabulary - 4
    reference = Reference.load(tmp_path, block, mask)
    asked = prompts(vocabulary, seed)
    wanted = [reference.generate(prompt, 40, Rule(threshold=0.6), (end,)) for prompt in asked]
    robust = [i for i, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= 3, "the reference met too many near ties to test anything"
    with engine(tmp_path, block) as running:
        got = running.generate(asked, [greedy(40, diffusion_threshold=0.6) for _ in asked])
        for i in robust:
            assert got[i][0] == wanted[i].tokens, f"prompt of {LENGTHS[i]} tokens"
        running.assert_idle()


def test_experts_are_chosen_in_float32(tmp_path: Path) -> None:
    """In bfloat16 too, as in the authors' code; vLLM's backbone would round the scores first."""
    from vllm_dllm.families.llada2.model import LLaDA2Moe

    random_checkpoint(tmp_path, 0)
    with engine(tmp_path, 16, dtype="bfloat16") as running:
        layers = [m for m in running.runner.model.modules() if isinstance(m, LLaDA2Moe)]
        assert len(layers) == 2
        seen: set[torch.dtype] = set()
        for layer in layers:
            layer.experts.register_forward_pre_hook(
                lambda module, args, kwargs: seen.add(kwargs["router_logits"].dtype),
                with_kwargs=True,
            )
        assert len(running.generate([[5, 6, 7]], [greedy(20, ignore_eos=True)])[0][0]) == 20
        assert seen == {torch.float32}
