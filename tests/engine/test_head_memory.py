"""A denoise step never holds logits: 32 requests at the real vocabulary in under 64 MB."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import head_memory

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_peak_of_a_denoise_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head_memory.make_model(tmp_path)
    found = head_memory.child(tmp_path, native=False, requests=32)
    whole_rows = head_memory.CANVAS * head_memory.VOCABULARY * 4
    with capsys.disabled():
        print(
            f"\n{found['bytes'] / 1e6:.0f} MB beyond the resting process for 32 requests, "
            f"{found['per_request'] / 1e6:.1f} MB a request; its logits alone would take "
            f"{whole_rows / 1e6:.0f} MB"
        )
    assert found["bytes"] < 64 << 20
