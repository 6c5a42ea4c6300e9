"""The judgement of a case, on answers that nobody had to compute."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import TINY
from tests.support.reference_sdar import RULES
from vllm_dllm.selftest.cases import FAMILIES, Case
from vllm_dllm.selftest.children import Outcome
from vllm_dllm.selftest.command import examine
from vllm_dllm.selftest.golden import (
    AGREEMENT,
    CHECKPOINTS,
    GOLDEN,
    Golden,
    GoldenError,
    judge,
    load,
    significantly_worse,
)

EXACT = Case("llada2", "CPU_ATTN", "EAGER", "torch", "float32", "sync")
HALF = Case("llada2", "CPU_ATTN", "EAGER", "torch", "bfloat16", "sync")
CACHED = Case("llada2", "CPU_ATTN", "EAGER", "torch", "bfloat16", "sync", "fp8")


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load(GOLDEN, TINY, "llada2")


def answered(golden: Golden, case: Case) -> dict[str, Any]:
    """The answers of an engine without faults."""
    together = {
        one["id"]: {
            "tokens": one["tokens"][case.window],
            "parts": 9 if one["stream"] else 1,
            "logprobs": one.get("logprobs", []),
        }
        for one in golden.requests
    }
    problems = golden.problems
    right = [
        answer if fine == "1" else [0]
        for answer, fine in zip(problems["answers"], problems["right"], strict=True)
    ]
    names = ("backend", "flash", "kernels", "scheduling", "commits", "dtype")
    chosen = {name: getattr(case, name) for name in names}
    alone = {one["id"]: together[one["id"]] for one in golden.requests if one["alone"]}
    answer = {"chosen": chosen, "together": together, "alone": alone, "problems": right}
    return {name: copy.deepcopy(part) for name, part in answer.items()}


@pytest.mark.parametrize("case", [EXACT, HALF, CACHED])
def test_an_engine_without_faults_passes(golden: Golden, case: Case) -> None:
    verdict = judge(case, golden, answered(golden, case))
    assert verdict.faults == [] and verdict.differ == []
    assert verdict.right == verdict.reference_right == golden.problems["right"].count("1")


@pytest.mark.parametrize("place", ["together", "alone"])
def test_one_token_is_enough_in_float32(golden: Golden, place: str) -> None:
    answer = answered(golden, EXACT)
    name = next(iter(answer["alone"]))
    answer[place][name]["tokens"][-1] ^= 1
    verdict = judge(EXACT, golden, answer)
    assert verdict.faults == [f"1 of {len(golden.requests)} requests differ: {name}"]
    assert [(one["id"], one["place"]) for one in verdict.differ] == [(name, place)]
    answer["chosen"]["dtype"] = "bfloat16"
    assert judge(HALF, golden, answer).faults == []


def test_half_precision_may_differ_in_few_requests(golden: Golden) -> None:
    answer, total = answered(golden, HALF), len(golden.requests)
    names = [one["id"] for one in golden.requests]
    allowed = total - math.ceil(AGREEMENT * total)
    for name in names[:allowed]:
        answer["together"][name]["tokens"] = []
    assert judge(HALF, golden, answer).faults == []
    answer["together"][names[allowed]]["tokens"] = []
    (fault,) = judge(HALF, golden, answer).faults
    assert fault.startswith("only ")
    assert judge(CACHED, golden, answer).faults == [], "float8 is not judged by tokens"


@pytest.mark.parametrize("case", [EXACT, HALF, CACHED])
def test_accuracy_is_judged_in_every_type(golden: Golden, case: Case) -> None:
    answer = answered(golden, case)
    reference, total = golden.problems["right"].count("1"), len(golden.problems["right"])
    right = [n for n, fine in enumerate(golden.problems["right"]) if fine == "1"]
    margin = max(
        fewer
        for fewer in range(100)
        if not significantly_worse(reference - fewer, reference, total)
    )
    for n in right[:margin]:
        answer["problems"][n] = []
    assert judge(case, golden, answer).faults == []
    answer["problems"][right[margin]] = []
    (fault,) = judge(case, golden, answer).faults
    assert fault == f"{reference - margin - 1} of {total} problems right, the reference has " + str(
        reference
    )


@pytest.mark.parametrize("share", [0.5, 0.8, 0.91, 0.96])
def test_a_faultless_engine_hardly_ever_fails(share: float) -> None:
    """Exactly, over all counts of two independent runs."""
    n = 200
    chances = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
    failed = sum(
        chances[right] * chances[reference]
        for right in range(n + 1)
        for reference in range(right, n + 1)
        if significantly_worse(right, reference, n)
    )
    assert 1e-5 < failed < 1.3e-3


def test_the_margin() -> None:
    assert not significantly_worse(158, 180, 200) and significantly_worse(157, 180, 200)
    assert not significantly_worse(200, 200, 200)


def test_an_engine_that_chose_otherwise_fails(golden: Golden) -> None:
    answer = answered(golden, EXACT)
    answer["chosen"] |= {"backend": "CUSTOM", "kernels": "triton", "scheduling": "async"}
    assert judge(EXACT, golden, answer).faults == [
        "asked for backend CPU_ATTN, got CUSTOM",
        "asked for kernels torch, got triton",
        "asked for scheduling sync, got async",
    ]


@pytest.mark.parametrize(
    ("fused", "scheduling", "way"),
    [("on", "async", "two blocks"), ("on", "sync", "granted"), ("off", "async", "separate")],
)
def test_an_engine_that_commits_otherwise_fails(
    golden: Golden, fused: str, scheduling: str, way: str
) -> None:
    """A setting that is lost would leave a case green without what it is there for."""
    case = replace(EXACT, fused_commit=fused, scheduling=scheduling)
    answer = answered(golden, case)
    assert answer["chosen"]["commits"] == way and judge(case, golden, answer).faults == []
    answer["chosen"]["commits"] = "another way"
    assert judge(case, golden, answer).faults == [f"asked for commits {way}, got another way"]
    assert judge(EXACT, golden, answer | {"chosen": answer["chosen"] | {"scheduling": "sync"}}) == (
        judge(EXACT, golden, answered(golden, EXACT))
    ), "whoever asks for nothing takes any way"


def test_streams_and_logprobs_are_looked_at(golden: Golden) -> None:
    answer = answered(golden, EXACT)
    streamed = next(one["id"] for one in golden.requests if one["stream"])
    answer["together"][streamed]["parts"] = 1
    name = next(one["id"] for one in golden.requests if "logprobs" in one)
    answer["together"][name]["logprobs"][0][0][1] += 0.1
    assert judge(EXACT, golden, answer).faults == [
        fault
        for one in golden.requests
        for fault in (
            [f"{streamed}: not streamed in pieces"] * (one["id"] == streamed)
            + [f"{name}: a logprob is off by 0.1"] * (one["id"] == name)
        )
    ]
    answer["together"][name]["logprobs"][0][0][1] = math.nan
    assert any("not one finite list" in fault for fault in judge(EXACT, golden, answer).faults)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_files(family: str) -> None:
    """They belong to the checkpoints of the package, and have what they should."""
    golden = load(GOLDEN, CHECKPOINTS, family)
    assert golden.checkpoint.samefile(TINY / FAMILIES[family])
    kinds = {one["kind"] for one in golden.requests}
    assert {"greedy", "seeded", "filtered", "structured", "logprobs", "stream"} <= kinds
    assert kinds & {"threshold", "steps"}
    lengths = {len(one["prompt"]) for one in golden.requests}
    assert {1, 31, 32, 33, 300, 700} <= lengths
    by_reference = [one for one in golden.requests if one["source"] == "reference"]
    assert len(by_reference) >= len(golden.requests) / 2
    assert {one["source"] for one in golden.requests} == {"reference", "engine"}
    if family == "diffusion_gemma":
        rules = [one["tokens"] for one in golden.requests]
        assert any(one["symmetric"] != one["reference"] for one in rules), "they tell them apart"
    if family == "sdar":
        options = [one["params"]["extra_args"] for one in by_reference]
        assert set(RULES) <= {one.get("diffusion_algorithm") for one in options}
    counts = {len(golden.problems[name]) for name in ("prompts", "answers", "right")}
    assert counts == {200}
    assert golden.problems["right"].count("1") >= 170
    job = golden.job(EXACT)
    assert not any("tokens" in one for one in job["requests"]), "the child does not know them"


def test_answers_of_other_weights_are_refused(tmp_path: Path) -> None:
    name = FAMILIES["llada2"]
    with pytest.raises(GoldenError, match=r"model\.safetensors is absent"):
        load(GOLDEN, tmp_path, "llada2")
    shutil.copytree(TINY / name, tmp_path / name)
    weights = tmp_path / name / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(GoldenError, match="answers of other weights"):
        load(GOLDEN, tmp_path, "llada2")


def test_a_case_without_an_answer_fails(golden: Golden) -> None:
    jobs: list[dict[str, Any]] = []

    def crash(job: dict[str, Any]) -> Outcome:
        jobs.append(json.loads(json.dumps(job)))
        return Outcome(None, "killed by SIGSEGV", ("last words",), 3.0)

    result = examine(EXACT, golden, crash)
    assert (result.result, result.reason, result.log) == (
        "FAILED",
        "killed by SIGSEGV",
        ("last words",),
    )
    assert jobs[0]["case"]["name"] == EXACT.name
    assert examine(EXACT, GoldenError("absent"), crash).reason == "absent"
    assert len(jobs) == 1
