"""What PyTorch's compiler generates for a GPU compiles there, with Triton kernels and without.

A start on a GPU fails where it does not: with PyTorch 2.11, the compiler once multiplied indices by
constants of 64 bits in 32.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.child import in_child
from tests.support.long import long_but

NAMES = ("SDAR-1.7B", "LLaDA2.0-mini", "DiffusionGemma")
# With PyTorch's kernels or ours, and of the model's own algorithm or of every one.
CASES = product(NAMES, ("torch", "triton"), ("own", "every"))


@pytest.mark.parametrize(
    ("model", "kernels", "algorithms"), long_but([("SDAR-1.7B", "torch", "own")], CASES)
)
def test_every_kernel_compiles(model: str, kernels: str, algorithms: str) -> None:
    child = "tests.support.children.fake_steps:errors"
    found = in_child(child, model, kernels == "triton", algorithms == "every")
    functions = {function for function, _, _ in found}
    assert "finish" in functions and len(found) > len(functions)
    assert {(f, kernel): error for f, kernel, error in found if error} == {}
