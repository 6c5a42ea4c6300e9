"""What PyTorch's compiler generates for a GPU compiles there, with Triton kernels and without.

A start on a GPU fails where it does not: with PyTorch 2.11, the compiler once multiplied indices by
constants of 64 bits in 32.
"""

from __future__ import annotations

import pytest

from tests.support.child import in_child


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "model",
    [
        "SDAR-1.7B",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("LLaDA2.0-mini", "DiffusionGemma")),
    ],
)
def test_every_kernel_compiles(model: str, kernels: str) -> None:
    child = "tests.support.children.fake_steps:errors"
    found = in_child(child, model, kernels == "triton")
    functions = {function for function, _, _ in found}
    assert "finish" in functions and len(found) > len(functions)
    assert {(f, kernel): error for f, kernel, error in found if error} == {}
