"""Fixtures for the tests of the row-statistics kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def garbage_before_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the tensors that a kernel writes with garbage, so that what it leaves out is seen."""

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else 987_654_321
        return torch.full(tuple(shape), value, dtype=dtype, device=device)

    from tests.support.ops.triton_statistics import rows_triton, soft_embedding

    for module in (rows_triton, soft_embedding):
        monkeypatch.setattr(module, "empty", poisoned)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran; running the reference fails the test."""
    from tests.support.ops.triton_statistics import rows_triton, soft_embedding, unread
    from vllm_dllm.ops.statistics import tiled

    found: list[str] = []
    for module in (rows_triton, soft_embedding):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                run = counted(name, kernel.run, found)
                monkeypatch.setattr(kernel, "run", run)
    for name in ("tiled_statistics", "_Running"):
        monkeypatch.setattr(tiled, name, unread)
    return found


def counted(name: str, run: Callable[..., object], found: list[str]) -> Callable[..., object]:
    def count(*args: object, **kwargs: object) -> object:
        found.append(name)
        return run(*args, **kwargs)

    return count
