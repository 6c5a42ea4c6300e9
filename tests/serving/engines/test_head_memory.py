"""A denoise step with the real vocabulary takes little memory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import head_memory

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]


def test_eight_requests_at_the_real_vocabulary(tmp_path: Path) -> None:
    """Whole rows of logits would be 268 MB a request."""
    head_memory.make_model(tmp_path)
    found = head_memory.in_child(tmp_path, requests=8)
    assert found["bytes"] < 64 * head_memory.MEGABYTE
