"""The self-test of the kernels: it passes here, and names the kernel that is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.support.ops.interpreter import interpreted
from tests.support.ops.triton_statistics import DEVICE, decided, unread
from vllm_dllm.ops.statistics.head import Head

pytestmark = pytest.mark.slow

self_test = interpreted("vllm_dllm.ops.statistics.self_test_triton")


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a second for each hundred rows."""
    monkeypatch.setattr(self_test, "ROWS", (20, 40))


def head(dtype: torch.dtype, cap: float | None = None, width: int = 48) -> Head:
    weight = torch.empty(5, width, dtype=dtype, device=DEVICE)
    return Head(unread, 5, None, None, weight, cap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("masked", "cap"), [(True, None), (False, 30.0)])
def test_passes(dtype: torch.dtype, masked: bool, cap: float | None) -> None:
    assert self_test.failures(head(dtype, cap), masked) == []


def test_no_draw_is_within_rounding() -> None:
    """Or a GPU, whose logarithms differ in their last bits, could fail for no reason."""
    # DiffusionGemma's width, with the rows of the test; and what is used here.
    for width, rows in ((2816, 16), (2816, 32), (2816, 64), (2816, 128), (48, 20), (48, 40)):
        case = self_test._Case(head(torch.bfloat16, 30.0, width), rows)
        warm = case.temperature > 0
        logits = case._logits(case.hidden, 0, self_test.IDS)
        scaled = logits / torch.where(warm, case.temperature, 1.0)[:, None]
        assert decided(scaled, case.keys)[warm].all()


def test_names_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a kernel that takes the last of tied ids in place of the first."""
    right = self_test.head_statistics

    def wrong(*args: object, **kwargs: object) -> object:
        partials = right(*args, **kwargs)
        partials.token[partials.token < self_test.IDS - self_test.COPIED] += self_test.COPIED
        return partials

    monkeypatch.setattr(self_test, "head_statistics", wrong)
    found = self_test.failures(head(torch.bfloat16), True)
    assert found == ["head: token of 20 rows", "head: token of 40 rows"]
