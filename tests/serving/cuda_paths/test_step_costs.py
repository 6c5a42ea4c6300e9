"""What admissions and steps cost at the published sizes: kernels, copies, and waits.

Counted on a fake accelerator, see `tests.support.fake_accelerator`. No step waits, whatever its
requests ask for. The numbers of kernels and copies are pinned in ``step_costs.json``, so that a
change of either is seen; after an intended change, write the file anew and look at the difference:

    python -m tests.serving.cuda_paths.test_step_costs

Requests with logprobs are left out: vLLM wants their results on the host when tokens leave.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import answers_of_child

PINNED = Path(__file__).with_name("step_costs.json")
# Operators of DiffusionGemma's head are another test's subject.
HEAD = ("ops/",)
WARM = {"temperature": 0.7}
BIASES: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {5: 1.0, 6: -1.0}},
    "allowed ids": {"allowed_token_ids": [5, 6, 7]},
    "bad words": {"banned": [5, 6]},
    "min_tokens": {"min_tokens": 9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
}
FILTERS: dict[str, dict[str, Any]] = {
    "top_k and top_p": {"top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
}
EVERYTHING: dict[str, Any] = {
    **{name: value for asked in BIASES.values() for name, value in asked.items()},
    **FILTERS["top_k and top_p"],
    **FILTERS["min_p"],
}
CONSTRAINED = {"constrained": True}
# What shares a batch with the canvases, or their shapes.
BESIDE: dict[str, dict[str, int]] = {
    "beside 3 prefills": {"prefills": 3},
    "a narrow canvas": {"narrow": 7},
}


def masked_cases() -> dict[str, dict[str, Any]]:
    """Cases of LLaDA2.0-mini by name, without a number of canvases."""
    both = [{"options": {"algorithm": name}} for name in ("FixedSteps", "JointThreshold")]
    cases: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"requests": [WARM]},
        **{name: {"beside": beside} for name, beside in BESIDE.items()},
        "fused commits": {"beside": {"committing": 1}},
        **{name: {"requests": [asked]} for name, asked in BIASES.items()},
        **{name: {"requests": [WARM | asked]} for name, asked in FILTERS.items()},
        "everything": {"requests": [WARM | EVERYTHING]},
        "everything, every other request": {"requests": [WARM | EVERYTHING, {}]},
        "constrained": {"requests": [CONSTRAINED]},
        "constrained, drawn": {"requests": [WARM | CONSTRAINED]},
        "two algorithms": {"requests": both},
        "two algorithms, constrained": {"requests": [CONSTRAINED | one for one in both]},
    }
    return {f"LLaDA2.0-mini: {name}": {"model": "llada2"} | case for name, case in cases.items()}


def noise_cases() -> dict[str, dict[str, Any]]:
    """The same for DiffusionGemma."""
    cases: dict[str, dict[str, Any]] = {
        "drawn": {},
        **{name: {"beside": beside} for name, beside in BESIDE.items()},
        **{name: {"requests": [asked]} for name, asked in (BIASES | FILTERS).items()},
        "everything": {"requests": [EVERYTHING]},
        "everything, every other request": {"requests": [EVERYTHING, {}]},
        "constrained": {"requests": [CONSTRAINED]},
    }
    common = {"model": "gemma", "head": False}
    return {f"DiffusionGemma: {name}": common | case for name, case in cases.items()}


ADMISSIONS: dict[str, dict[str, Any]] = {
    "LLaDA2.0-mini: a seed canvas": {
        "model": "llada2",
        "requests": [{"options": {"seed_canvas": [1, 2, 3], "pinned": [1]}}],
    },
}
CASES = masked_cases() | noise_cases() | ADMISSIONS


def sizes(name: str) -> tuple[int, ...]:
    """Numbers of requests."""
    if name in ADMISSIONS:
        return (1,)
    return (1, 8, 16) if name.endswith((": greedy", ": drawn")) else (1, 16)


def measured(names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """The costs of cases at their sizes, by name."""
    cases = [(name, CASES[name] | {"canvases": n}) for name in names for n in sizes(name)]
    found = answers_of_child("fake_steps", [case for _, case in cases])
    costs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for (name, _), cost in zip(cases, found, strict=True):
        costs[name].append(cost)
    return costs


def kernels(name: str, cost: dict[str, Any]) -> int:
    left_out = HEAD if name.startswith("DiffusionGemma") else ()
    return sum(n for file, n in cost["kernels"].items() if not file.startswith(left_out))


def table(costs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What ``step_costs.json`` pins: kernels and copies, one number for each of `sizes`."""
    return {
        name: {
            "admission": [kernels(name, of[0]["admission"]), of[0]["admission"]["copies"]],
            "kernels": [kernels(name, cost["step"]) for cost in of],
            "copies": [cost["step"]["copies"] for cost in of],
        }
        for name, of in costs.items()
    }


@pytest.fixture(
    scope="module", params=["LLaDA2", pytest.param("DiffusionGemma", marks=pytest.mark.long)]
)
def costs(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """The costs of a model's cases."""
    return measured([name for name in CASES if name.startswith(request.param)])


def test_the_fake_accelerator_counts() -> None:
    """Lines whose costs are known: kernels, copies that go on at once, and waits."""
    (found,) = answers_of_child("known_costs")
    assert {name: tuple(numbers) for name, *numbers in found} == {
        "a view": (0, 0, 0),
        "a kernel": (1, 0, 0),
        "fill_": (1, 0, 0),
        "to_device": (0, 1, 0),
        "unpinned": (0, 0, 1),
        "pinned, but waits": (0, 0, 1),
        "pinned": (0, 1, 0),
        "to pinned memory": (0, 1, 0),
        "to the host": (0, 0, 1),
        "a list": (0, 0, 1),
        "item": (1, 0, 1),
        "if": (1, 0, 1),
        "tolist": (0, 0, 4),
        "a number into a place": (2, 0, 1),
        "a number into a slice": (2, 0, 0),
        "a number into indices": (2, 0, 1),
        "a tensor into a mask": (1, 0, 1),
        "repeats of known length": (2, 0, 0),
    }


def test_nothing_waits(costs: dict[str, list[dict[str, Any]]]) -> None:
    """Neither an admission nor a step: no blocking copy, and no value is read back."""
    waits = {
        (name, part): cost[part]["waits"]
        for name, of in costs.items()
        for cost in of
        for part in ("admission", "step")
    }
    assert {case: found for case, found in waits.items() if found} == {}


def test_costs_are_pinned(costs: dict[str, list[dict[str, Any]]]) -> None:
    pinned = json.loads(PINNED.read_text())
    assert table(costs) == {name: pinned[name] for name in costs}


def test_the_table_has_no_other_rows() -> None:
    assert set(json.loads(PINNED.read_text())) == set(CASES)


if __name__ == "__main__":
    rows = [
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table(measured(CASES)).items()
    ]
    PINNED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
