"""Pools of processes that compile constraints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from canvas_grammar_support.helpers import pieces

from vllm_dllm.constraints.pool import CompilerPool, PoolLimits


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompilerPool]:
    found = CompilerPool(pieces)
    yield found
    found.close()


@pytest.fixture
def one() -> Iterator[CompilerPool]:
    """A process that needs a kill to get anywhere: nothing is too slow for it."""
    found = CompilerPool(pieces, PoolLimits(cpu_seconds=300, wait_seconds=0.5), processes=1)
    yield found
    found.close()
