"""Tests for the vLLM that is installed where it is one that this package does not support.

`scripts/versions.sh` runs them; elsewhere there is nothing here to collect.
"""

from __future__ import annotations

from vllm_dllm.vllm_seams import versions

collect_ignore = ["test_unsupported.py"] if versions.version_problem() is None else []
