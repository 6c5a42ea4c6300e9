"""What admissions and steps cost at the published sizes: kernels, copies, and waits.

Counted on a fake accelerator, as on a GPU by default: with Triton kernels and compiled functions,
see `tests.support.children.fake_steps`. No step waits, whatever its
requests ask for. The numbers of kernels and copies are pinned in ``step_costs.json``, so that a
change of either is seen; after an intended change, write the file anew and look at the difference:

    python -m tests.serving.cuda_paths.test_step_costs

That vLLM wants logprobs on the host when tokens leave is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import in_child
from vllm_dllm.engine.readout_masked import HEAD_BYTES_GPU
from vllm_dllm.engine.readout_triton import ROWS_BYTES
from vllm_dllm.selftest.steps import MODELS

PINNED = Path(__file__).with_name("step_costs.json")
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
LOGPROBS = {"logprobs": 5}
# Cases of SDAR, whose readout is that of LLaDA2 over shorter blocks.
OF_SDAR = ("greedy", "drawn", "top_k and top_p", "min_p", "constrained", "constrained, drawn")
# What shares a batch with the canvases, their shapes, or how often a step reads them.
BESIDE: dict[str, dict[str, int]] = {
    "3 passes": {"passes": 3},
    "beside 3 prefills": {"prefills": 3},
    "a narrow canvas": {"narrow": 7},
}


def masked_cases() -> dict[str, dict[str, Any]]:
    """Cases of masked models by name, without a number of canvases."""
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
        "logprobs": {"requests": [LOGPROBS]},
        "constrained": {"requests": [CONSTRAINED]},
        "constrained, drawn": {"requests": [WARM | CONSTRAINED]},
        "two algorithms": {"requests": both},
        "two algorithms, constrained": {"requests": [CONSTRAINED | one for one in both]},
    }
    return {
        f"{model}: {name}": {"model": model} | case
        for model, names in {"LLaDA2.0-mini": cases, "SDAR-1.7B": OF_SDAR}.items()
        for name, case in cases.items()
        if name in names
    }


def noise_cases() -> dict[str, dict[str, Any]]:
    """The same for DiffusionGemma."""
    cases: dict[str, dict[str, Any]] = {
        "drawn": {},
        **{name: {"beside": beside} for name, beside in BESIDE.items()},
        **{name: {"requests": [asked]} for name, asked in (BIASES | FILTERS).items()},
        "everything": {"requests": [EVERYTHING]},
        "everything, every other request": {"requests": [EVERYTHING, {}]},
        "logprobs": {"requests": [LOGPROBS | {"temperature": 0.0}]},
        "logprobs, drawn": {"requests": [LOGPROBS]},
        "constrained": {"requests": [CONSTRAINED]},
    }
    return {
        f"DiffusionGemma: {name}": {"model": "DiffusionGemma"} | case
        for name, case in cases.items()
    }


ADMISSIONS: dict[str, dict[str, Any]] = {
    "LLaDA2.0-mini: a seed canvas": {
        "model": "LLaDA2.0-mini",
        "requests": [{"options": {"seed_canvas": [1, 2, 3], "pinned": [1]}}],
    },
}
CASES = masked_cases() | noise_cases() | ADMISSIONS


def sizes(name: str) -> tuple[int, ...]:
    """Numbers of requests."""
    return (1,) if name in ADMISSIONS else (1, 4, 16)


def measured(names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """The costs of cases at their sizes, by name."""
    cases = [(name, CASES[name] | {"canvases": n}) for name in names for n in sizes(name)]
    found = in_child("tests.support.children.fake_steps:costs", [case for _, case in cases])
    costs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for (name, _), cost in zip(cases, found, strict=True):
        costs[name].append(cost)
    return costs


def table(costs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What ``step_costs.json`` pins: kernels and copies, one number for each of `sizes`."""
    return {
        name: {
            "admission": [of[0]["admission"][what] for what in ("kernels", "copies")],
            "kernels": [cost["step"]["kernels"] for cost in of],
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


def test_nothing_waits(costs: dict[str, list[dict[str, Any]]]) -> None:
    """Neither an admission nor a step: no blocking copy, and no value is read back."""
    waits = {
        (name, part): cost[part]["waits"]
        for name, of in costs.items()
        for cost in of
        for part in ("admission", "step")
    }
    assert {case: found for case, found in waits.items() if found} == {}


def test_options_write_no_rows_of_logits(costs: dict[str, list[dict[str, Any]]]) -> None:
    """What a step writes is the logits in the head's dtype; only constraints need more of them."""
    for name, of in costs.items():
        model, beside = MODELS[CASES[name]["model"]], CASES[name].get("beside", {})
        budget = ROWS_BYTES if model.kind.mask_token is None else HEAD_BYTES_GPU
        rows = 8 * model.kind.vocabulary * model.kind.length if "constrained" in name else 0
        for count, cost in zip(sizes(name), of, strict=True):
            most = budget * beside.get("passes", 1) + count * rows
            assert cost["step"]["written"] <= most, name


def test_costs_are_pinned(costs: dict[str, list[dict[str, Any]]]) -> None:
    pinned = json.loads(PINNED.read_text())
    assert set(pinned) == set(CASES)
    assert table(costs) == {name: pinned[name] for name in costs}


def test_every_form_of_a_triton_kernel_is_compiled_at_the_start() -> None:
    cases = [CASES[name] | {"canvases": 4} for name in CASES if not name.startswith("SDAR")]
    found = in_child("tests.support.children.fake_steps:forms", cases)
    assert len(found) == len(cases)
    assert {str(each["case"]): each["missing"] for each in found if each["missing"]} == {}


if __name__ == "__main__":
    rows = [
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table(measured(CASES)).items()
    ]
    PINNED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
