"""An eager engine of ours takes the norms of vllm-cpu-v2."""

from __future__ import annotations

import pytest
from vllm_cpu_v2 import norms

from tests.support import oracle
from tests.support.engine import engine, greedy


@pytest.mark.engine
def test_an_eager_engine_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    supports = norms._supports
    monkeypatch.setattr(norms, "_supports", lambda *a: taken.append(supports(*a)) or taken[-1])
    golden = oracle.checkpoint("ckpt_b_b8")
    with engine(golden.path, golden.block_size) as running:
        taken.clear()
        running.generate([golden.prompts["p9"].tokens], [greedy(8)])
    assert taken
    assert all(taken)
