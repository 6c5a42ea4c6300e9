"""Read golden answers, and judge the answers of a case by them.

A golden file has requests with their float32 answers, and 200 problems with one right answer each.
``scripts/selftest_golden.py`` makes it.

In float32 each request's tokens must be equal, in a full batch and alone. In other dtypes kernels
round differently, and at least the share `AGREEMENT` of the requests must have the same answer. The
CPU's compiled bfloat16 gives 49 of 54, 46 of 47 and 52 of 54; at such a rate 0.7 is five standard
deviations away. Float8 keys and values round more, so there only the accuracy decides: at most the
share `MARGIN` of the problems less often right than the reference, which gets 182 to 192 of 200.
For a faultless engine this would be 3.5 standard deviations of the difference or more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dllm.selftest.cases import DEFAULT, FAMILIES, Case

GOLDEN = Path(__file__).resolve().parent / "golden"
AGREEMENT = 0.7
MARGIN = 0.1
LOGPROB = 1e-2  # float32 logprobs may differ this much, as matrices are summed in another order


@dataclass(frozen=True)
class Verdict:
    """The judgement of one case."""

    faults: list[str]  # why it fails; empty if it passes
    # For each answer that differs: `id`, `place` (``together`` or ``alone``), `golden`, `tokens`.
    differ: list[dict[str, Any]]
    requests: int  # golden ones
    right: int  # problems that the engine answered correctly
    reference: int  # problems that the reference answered correctly

    def __str__(self) -> str:
        same = self.requests - len({one["id"] for one in self.differ})
        counts = f"{same} of {self.requests} requests, {self.right} problems ({self.reference})"
        return "; ".join([counts, *self.faults])


def load(family: str) -> dict[str, Any]:
    """Read the golden file of a family."""
    content: dict[str, Any] = json.loads((GOLDEN / f"{FAMILIES[family]}.json").read_text("utf-8"))
    return content


def judge(case: Case, golden: Mapping[str, Any], answer: Mapping[str, Any]) -> Verdict:
    """Judge what `child.run` has returned for a case by the golden file of its family."""
    faults = list(_chosen_otherwise(case, answer["chosen"]))
    differ = []
    requests, problems = golden["requests"], golden["problems"]
    for request in requests:
        wanted = request["tokens"][case.window]
        for place in ("together", "alone"):
            got = answer[place].get(request["id"])
            if got is not None and got["tokens"] != wanted:
                tokens = {"golden": wanted, "tokens": got["tokens"]}
                differ.append({"id": request["id"], "place": place, **tokens})
        faults += _stream_and_logprobs(case, request, answer["together"][request["id"]])
    total, wrong = len(requests), sorted({one["id"] for one in differ})
    if case.exact and wrong:
        faults.append(f"{len(wrong)} of {total} requests differ: {', '.join(wrong[:4])}")
    elif case.cache == "auto" and total - len(wrong) < AGREEMENT * total:
        faults.append(f"only {total - len(wrong)} of {total} requests have the golden tokens")
    pairs = zip(answer["problems"], problems["answers"], strict=True)
    right, reference = sum(got == wanted for got, wanted in pairs), problems["right"].count("1")
    count = len(problems["answers"])
    if reference - right > MARGIN * count:
        faults.append(f"{right} of {count} problems right, the reference has {reference}")
    return Verdict(faults, differ, total, right, reference)


def _chosen_otherwise(case: Case, chosen: Mapping[str, Any]) -> Iterator[str]:
    """Faults in what the engine chose. It may reduce a graph mode, which it logs."""
    for name in ("backend", "flash", "kernels", "scheduling", "fused_commit", "dtype"):
        wanted = getattr(case, name)
        if wanted not in (DEFAULT, None, chosen[name]):
            yield f"asked for {name} {wanted}, got {chosen[name]}"


def _stream_and_logprobs(
    case: Case, request: Mapping[str, Any], got: Mapping[str, Any]
) -> Iterator[str]:
    prefix = request["params"].get("extra_args", {}).get("diffusion_stream_prefix")
    if prefix and case.exact and got["parts"] < 2:
        yield f"{request['id']}: not streamed in pieces"
    if "logprobs" not in request:
        return
    values, wanted = (
        [[value for _, value in place] for place in each["logprobs"]] for each in (got, request)
    )
    finite = all(math.isfinite(value) for row in values for value in row)
    if len(values) != len(got["tokens"]) or not finite:
        yield f"{request['id']}: not one finite list of logprobs a token"
        return
    # The golden logprobs are those of the symmetric window.
    symmetric = case.window == "symmetric" and got["tokens"] == request["tokens"]["symmetric"]
    if case.exact and symmetric:
        # They are compared by rank, because equally likely ids may be in any order.
        rows = zip(values, wanted, strict=True)
        far = max(abs(a - b) for row in rows for a, b in zip(*row, strict=False))
        if far > LOGPROB:
            yield f"{request['id']}: a logprob is off by {far:.3g}"
