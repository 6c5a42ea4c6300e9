"""The golden files, and the judgement of a case on answers that nobody had to compute."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.support.checkpoints import TINY
from vllm_dllm.selftest.cases import FAMILIES, Case
from vllm_dllm.selftest.golden import AGREEMENT, MARGIN, judge, load

EXACT = Case("llada2", "CPU_ATTN", "EAGER", "torch", "float32", "sync")
HALF = replace(EXACT, dtype="bfloat16")
CACHED = replace(HALF, cache="fp8")
GOLDEN = load("llada2")
REQUESTS = GOLDEN["requests"]


def answered(case: Case) -> dict[str, Any]:
    together = {
        one["id"]: {
            "tokens": one["tokens"][case.window],
            "parts": 9 if one["stream"] else 1,
            "logprobs": one.get("logprobs", []),
        }
        for one in REQUESTS
    }
    problems = GOLDEN["problems"]
    right = [
        answer if fine == "1" else [0]
        for answer, fine in zip(problems["answers"], problems["right"], strict=True)
    ]
    alone = {one["id"]: together[one["id"]] for one in REQUESTS if one["alone"]}
    answer = {"chosen": vars(case), "together": together, "alone": alone, "problems": right}
    return copy.deepcopy(answer)


def faults(case: Case, answer: dict[str, Any]) -> list[str]:
    return judge(case, GOLDEN, answer).faults


@pytest.mark.parametrize("case", [EXACT, HALF, CACHED])
def test_an_engine_without_faults_passes(case: Case) -> None:
    verdict = judge(case, GOLDEN, answered(case))
    assert verdict.faults == [] and verdict.differ == []
    assert verdict.right == verdict.reference == GOLDEN["problems"]["right"].count("1")
    assert str(verdict) == "54 of 54 requests, 182 problems (182)"


@pytest.mark.parametrize("place", ["together", "alone"])
def test_one_token_is_enough_in_float32(place: str) -> None:
    answer = answered(EXACT)
    name = next(iter(answer["alone"]))
    answer[place][name]["tokens"] = [*answer[place][name]["tokens"], 1]
    verdict = judge(EXACT, GOLDEN, answer)
    assert verdict.faults == [f"1 of {len(REQUESTS)} requests differ: {name}"]
    assert {one["id"] for one in verdict.differ} == {name}
    assert place in {one["place"] for one in verdict.differ}
    answer["chosen"]["dtype"] = "bfloat16"
    assert faults(HALF, answer) == []


def test_half_precision_may_differ_in_few_requests() -> None:
    answer, total = answered(HALF), len(REQUESTS)
    names = [one["id"] for one in REQUESTS]
    allowed = total - math.ceil(AGREEMENT * total)
    for name in names[:allowed]:
        answer["together"][name]["tokens"] = []
    assert faults(HALF, answer) == []
    answer["together"][names[allowed]]["tokens"] = []
    (fault,) = faults(HALF, answer)
    assert fault.startswith("only ")
    assert faults(CACHED, answer) == [], "float8 is not judged by tokens"


@pytest.mark.parametrize("case", [EXACT, HALF, CACHED])
def test_accuracy_is_judged_in_every_dtype(case: Case) -> None:
    answer, problems = answered(case), GOLDEN["problems"]
    right = [n for n, fine in enumerate(problems["right"]) if fine == "1"]
    margin = int(MARGIN * len(problems["right"]))
    for n in right[: margin + 1]:
        assert faults(case, answer) == []
        answer["problems"][n] = []
    left = len(right) - margin - 1
    assert faults(case, answer) == [f"{left} of 200 problems right, the reference has {len(right)}"]


def test_an_engine_that_chose_otherwise_fails() -> None:
    """A setting that is lost would leave a case green without what it is there for."""
    answer = answered(EXACT)
    answer["chosen"] |= {"backend": "CUSTOM", "kernels": "triton", "scheduling": "async"}
    assert faults(EXACT, answer) == [
        "asked for backend CPU_ATTN, got CUSTOM",
        "asked for kernels torch, got triton",
        "asked for scheduling sync, got async",
    ]
    answer = answered(EXACT)
    answer["chosen"]["fused_commit"] = "off"
    assert faults(EXACT, answer) == [], "whoever asks for nothing takes any way"
    fused = replace(EXACT, fused_commit="on")
    assert faults(fused, answer) == ["asked for fused_commit on, got off"]


def test_streams_and_logprobs_are_looked_at() -> None:
    answer = answered(EXACT)
    streamed = next(one["id"] for one in REQUESTS if one["stream"])
    answer["together"][streamed]["parts"] = 1
    name = next(one["id"] for one in REQUESTS if "logprobs" in one)
    answer["together"][name]["logprobs"][0][0][1] += 0.1
    found = {f"{streamed}: not streamed in pieces", f"{name}: a logprob is off by 0.1"}
    assert set(faults(EXACT, answer)) == found
    answer["together"][name]["logprobs"][0][0][1] = math.nan
    assert any("not one finite list" in fault for fault in faults(EXACT, answer))


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_files(family: str) -> None:
    """They belong to the checkpoints of the package, and have what they should."""
    golden = load(family)
    weights = TINY / FAMILIES[family] / "model.safetensors"
    assert golden["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    requests = golden["requests"]
    kinds = {one["kind"] for one in requests}
    assert {"greedy", "seeded", "filtered", "structured", "logprobs", "stream"} <= kinds
    assert sum(one["source"] == "reference" for one in requests) >= len(requests) / 2
    if family == "diffusion_gemma":
        rules = [one["tokens"] for one in requests]
        assert any(one["symmetric"] != one["reference"] for one in rules), "they tell them apart"
    assert golden["problems"]["right"].count("1") >= 170
