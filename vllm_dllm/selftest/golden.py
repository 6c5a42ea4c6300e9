"""Read golden answers, and judge the answers of a case by them.

A golden file has requests with their float32 answers, and 200 problems with one right answer each.
The file says how it was made (`made`); ``scripts/selftest_golden.py`` makes it.

In float32 each request's tokens must be equal, in a full batch and alone. In other dtypes kernels
round differently, so tokens may differ; there the *accuracy* decides.

**The margin of the accuracy.** The reference gets R of n problems right, the engine E. If a
faultless engine in another dtype answered each problem independently, with the reference's chance
p, the difference R - E would have the variance 2 n p (1 - p), where (R + E) / 2n estimates p. In
fact both answer the same problems with the same weights, which makes the difference smaller, so
this variance is an upper bound. A case fails if R - E is more than z = 3.09 standard deviations,
which happens to a faultless engine with a probability of about 0.001 at most. With R = 180 of 200
it fails if E is 157 or less.

Accuracy alone would miss a fault that affects few requests. So at least the share `AGREEMENT` of
the golden requests, whose answers were the same in float32, bfloat16 and float16 on a CPU without
compilation, must have the same answer here. The CPU's compiled bfloat16, which rounds in other
places, gives 49 of 54, 46 of 47 and, for SDAR, 52 of 54; at such a rate 0.7 is five standard
deviations away. (float8 keys and values round more, so the share is only reported for them.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dllm.selftest.cases import DEFAULT, FAMILIES, Case

HERE = Path(__file__).resolve().parent
GOLDEN, CHECKPOINTS = HERE / "golden", HERE / "checkpoints"
DEVIATIONS = 3.09
AGREEMENT = 0.7
LOGPROB = 1e-2  # float32 logprobs may differ this much, as matrices are summed in another order


class GoldenError(ValueError):
    """Golden answers or their checkpoint are missing, or do not belong together."""


@dataclass(frozen=True)
class Golden:
    """The golden file of a family and its checkpoint."""

    family: str
    checkpoint: Path
    requests: list[dict[str, Any]]
    problems: dict[str, Any]

    def job(self, case: Case) -> dict[str, Any]:
        """The job for the child of a case, which has everything but the answers."""
        asked = ("id", "prompt", "params", "stream", "alone")
        params = self.problems["params"]
        return {
            "case": case.as_dict(),
            "environment": {"VLLM_DLLM_NATIVE": "0"},
            "model": str(self.checkpoint),
            "requests": [{name: one[name] for name in asked} for one in self.requests],
            "problems": [
                {"id": str(n), "prompt": prompt, "params": params}
                for n, prompt in enumerate(self.problems["prompts"])
            ],
        }


@dataclass(frozen=True)
class Verdict:
    """The judgement of one case.

    Attributes:
        faults: why it fails; empty if it passes.
        requests: number of golden answers.
        differ: for each answer that differs: `id`, `place` (``together`` or ``alone``), `golden`,
            `tokens`.
        right: number of problems that the engine answered correctly.
        reference_right: number of problems that the reference answered correctly.
        problems: number of problems.
    """

    faults: list[str]
    requests: int = 0
    differ: list[dict[str, Any]] = field(default_factory=list)
    right: int = 0
    reference_right: int = 0
    problems: int = 0


def load(golden: Path, checkpoints: Path, family: str) -> Golden:
    """The golden answers of a family.

    Raises:
        GoldenError: a file is missing, or the answers belong to another checkpoint.
    """
    name = FAMILIES[family]
    place, weights = golden / f"{name}.json", checkpoints / name / "model.safetensors"
    for path in (place, weights):
        if not path.is_file():
            raise GoldenError(f"{path} is absent")
    content = json.loads(place.read_text("utf-8"))
    if hashlib.sha256(weights.read_bytes()).hexdigest() != content["sha256"]:
        raise GoldenError(f"{place} has the answers of other weights than {weights}")
    return Golden(family, checkpoints / name, content["requests"], content["problems"])


def significantly_worse(right: int, reference: int, problems: int) -> bool:
    """Whether an engine with `right` correct answers is worse than a reference; see the module."""
    share = (right + reference) / (2 * problems)
    return reference - right > DEVIATIONS * math.sqrt(2 * problems * share * (1 - share))


def judge(case: Case, golden: Golden, answer: Mapping[str, Any]) -> Verdict:
    """Judge what the child of a case wrote.

    Args:
        case: the case.
        golden: its family's golden answers.
        answer: what `vllm_dllm.selftest.child.run` returned.
    """
    faults = [*_chosen_otherwise(case, answer["chosen"])]
    differ = []
    for request in golden.requests:
        want = request["tokens"][case.window]
        for place in ("together", "alone"):
            got = answer[place].get(request["id"])
            if got is not None and got["tokens"] != want:
                tokens = {"golden": want, "tokens": got["tokens"]}
                differ.append({"id": request["id"], "place": place, **tokens})
        faults += _pieces(request, answer["together"][request["id"]], case)
    total = len(golden.requests)
    wrong = {one["id"] for one in differ}
    if case.exact and wrong:
        faults.append(f"{len(wrong)} of {total} requests differ: {', '.join(sorted(wrong)[:4])}")
    elif case.cache == "auto" and total - len(wrong) < AGREEMENT * total:
        faults.append(f"only {total - len(wrong)} of {total} requests have the golden tokens")
    right = sum(
        got == want
        for got, want in zip(answer["problems"], golden.problems["answers"], strict=True)
    )
    reference, problems = golden.problems["right"].count("1"), len(golden.problems["answers"])
    if significantly_worse(right, reference, problems):
        faults.append(f"{right} of {problems} problems right, the reference has {reference}")
    return Verdict(faults, total, differ, right, reference, problems)


def _chosen_otherwise(case: Case, chosen: Mapping[str, str]) -> list[str]:
    """Faults in what the engine chose. It may reduce a graph mode, which it logs."""
    names = ("backend", "flash", "kernels", "scheduling", "commits", "dtype")
    return [
        f"asked for {name} {wanted}, got {chosen[name]}"
        for name, wanted in ((name, getattr(case, name)) for name in names)
        if wanted not in (DEFAULT, None, chosen[name])
    ]


def _pieces(request: Mapping[str, Any], got: Mapping[str, Any], case: Case) -> list[str]:
    """Faults of streams and logprobs."""
    faults = []
    prefix = request["params"].get("extra_args", {}).get("diffusion_stream_prefix")
    if prefix and case.exact and got["parts"] < 2:
        faults.append(f"{request['id']}: not streamed in pieces")
    if "logprobs" not in request:
        return faults
    if len(got["logprobs"]) != len(got["tokens"]) or not _finite(got["logprobs"]):
        faults.append(f"{request['id']}: not one finite list of logprobs a token")
    elif (
        case.exact
        and case.window == "symmetric"  # the window of the golden logprobs
        and got["tokens"] == request["tokens"]["symmetric"]
    ):
        far = _farthest(got["logprobs"], request["logprobs"])
        if not far <= LOGPROB:
            faults.append(f"{request['id']}: a logprob is off by {far:.3g}")
    return faults


def _finite(logprobs: Sequence[Sequence[Sequence[float]]]) -> bool:
    return all(math.isfinite(value) for place in logprobs for _, value in place)


def _farthest(
    got: Sequence[Sequence[Sequence[float]]], want: Sequence[Sequence[Sequence[float]]]
) -> float:
    """The largest difference between two lists of logprobs; infinite if their ids differ.

    Equally likely ids may stand in any order, and the least likely id of a position may be replaced
    by another that is equally likely.
    """
    largest = 0.0
    for mine, theirs in zip(got, want, strict=True):
        if len(mine) != len(theirs):
            return math.inf
        values = {int(token): value for token, value in mine}
        for (token, value), (_, at_rank) in zip(theirs, mine, strict=True):
            found = values.get(int(token), at_rank)
            largest = max(largest, abs(found - value))
    return largest
