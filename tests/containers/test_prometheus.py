"""Prometheus' own tool reads the configuration, and fires each alert when it should.

That a real server has the metrics and labels is tested in `tests/serving/servers`. Debian's package
`prometheus` has the tool.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.dashboard import MONITORING

PROMTOOL = shutil.which("promtool")


@pytest.mark.long
@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", str(MONITORING / "prometheus.yml")),  # the rules, too
        ("test", "rules", str(Path(__file__).parent / "alerts_test.yml")),
    ],
    ids=["configuration", "alerts"],
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
