"""A vLLM that this package does not support: it says so, and serves all other models as before.

`scripts/versions.sh` runs this, and `tests/serving/servers/test_other_models.py`: an ordinary model
answers alike with and without the plugin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import TINY_LLADA2
from tests.support.commands import run
from tests.support.server import Server
from vllm_dllm.vllm_seams import versions


def test_check_says_why_not() -> None:
    done = run(sys.executable, "-m", "vllm_dllm.cli", "check")
    assert done.returncode == 1
    assert f"vllm           {versions.vllm_version()} (supported: " in done.stdout
    problem = versions.version_problem()
    assert problem is not None
    assert problem in done.stderr


@pytest.mark.e2e
def test_only_our_model_is_refused(tmp_path: Path) -> None:
    """Each process says once that the plugin is inactive; the first of them then refuses."""
    log = tmp_path / "log"
    with pytest.raises(RuntimeError), Server(TINY_LLADA2, log=log):
        pass
    text = log.read_text()
    assert text.count(f"vllm-dllm is inactive: {versions.version_problem()}") == 1
    assert "llada2_moe" in text  # transformers' or vLLM's own words for an unknown model
