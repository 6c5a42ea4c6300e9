"""The times of steps beside a model, with models of few ids on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_dllm.selftest import steps

pytestmark = pytest.mark.long


def test_every_row_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        name: replace(
            model,
            hidden=32,
            kind=replace(
                model.kind,
                vocabulary=300,
                length=8,
                mask_token=None if model.kind.mask_token is None else 299,
            ),
        )
        for name, model in steps.MODELS.items()
    }
    monkeypatch.setattr(steps, "MODELS", few)
    monkeypatch.setattr(steps, "REQUESTS", (1, 3))
    monkeypatch.setattr(steps, "TIMED_STEPS", 2)
    rows = list(steps.bench())
    found = {(row["model"], row["step"], row["requests"]) for row in rows}
    assert found == {
        (name, row, count)
        for name, model in few.items()
        for row in (steps.OF_NOISE if model.kind.mask_token is None else steps.ASKED)
        for count in (1, 3)
    }
    assert all(0 < row["host_ms"] <= row["ms"] for row in rows)
