"""DiffusionGemma's soft embedding is computed where a canvas may go on, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.drive import gemma

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_canvases_of_one_step_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = gemma(tmp_path / "model")
    prompts = family.prompts((3, 20, 33), seed=4)
    one = [family.params(2 * family.length, "quick", ignore_eos=True) for _ in prompts]
    slow = family.params(2 * family.length, "slow", ignore_eos=True)
    with family.start() as running:
        readout = running.runner.model_state.readout
        read, computed = readout.read, []

        def watched(*args: Any) -> Any:
            readings = read(*args)
            computed.append(readings.soft_embedding is not None)
            return readings

        monkeypatch.setattr(readout, "read", watched)
        alone = running.generate(prompts, one)
        assert computed
        assert not any(computed)
        computed.clear()
        (wanted,) = running.generate(prompts[2:], [slow])
        assert all(computed), "canvases that are denoised again read their prediction"
        mixed = running.generate(prompts, [*one[:2], slow])
        assert mixed == [*alone[:2], wanted]
