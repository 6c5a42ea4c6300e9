"""DiffusionGemma on every path of CUDA gives the tokens of the CPU backend.

A batch has one causal flag for each request, which FlashAttention has from version 4 on, and which
Triton's and our kernel take in full graphs of mixed batches, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.support.cuda_paths.backends import FLASH_4, OURS, TRITON, Backend
from tests.support.cuda_paths.cases import GEMMA, MODES, check, plain, run
from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.families.anchored.attention import CausalUnlessDenoised

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Each backend, each scheduling, and the modes that LLaDA2's quick cases leave out.
QUICK = {
    (TRITON, "FULL", "async"),
    (FLASH_4, "FULL_DECODE_ONLY", "sync"),
    (OURS, "PIECEWISE", "async"),
}


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    return plain(GEMMA)


def cases() -> Iterator[object]:
    for case in product((FLASH_4, TRITON, OURS), MODES, ("sync", "async")):
        marks = () if case in QUICK else pytest.mark.long
        yield pytest.param(*case, marks=marks, id="-".join(map(str, case)))


@pytest.mark.parametrize(("backend", "mode", "scheduling"), cases())
def test_same_tokens(tokens: list[list[int]], backend: Backend, mode: str, scheduling: str) -> None:
    found = run(GEMMA, backend, mode, scheduling == "async")
    lowered = mode == "FULL" and backend != TRITON
    check(found, tokens, "FULL_DECODE_ONLY" if lowered else mode)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (
            Backend("FLASH_ATTN", 3),
            "--attention-backend FLASH_ATTN: .*FlashAttention 3 has no causal flag",
        ),
        # By vLLM, before our start-up.
        (Backend("FLASHINFER"), "FlashInfer does not support DiffusionGemma's mixed"),
    ],
    ids=["FLASH_ATTN_3", "FLASHINFER"],
)
def test_a_backend_without_a_flag_for_each_request_is_refused(
    backend: Backend, reason: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=reason):
        run(GEMMA, backend, "FULL_AND_PIECEWISE", asynchronous=True)


@pytest.mark.long
@pytest.mark.usefixtures("tokens")
def test_flags_in_a_new_tensor_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: every step allocates them, so a graph would read those of its capture."""
    metadata = CausalUnlessDenoised.metadata

    def allocating(self: CausalUnlessDenoised, batch: AttentionBatch) -> dict[str, Any]:
        self.causal = self.causal.clone()
        return metadata(self, batch)

    monkeypatch.setattr(CausalUnlessDenoised, "metadata", allocating)
    found = run(GEMMA, FLASH_4, "FULL_DECODE_ONLY", asynchronous=False)
    assert "a full graph: causal: elsewhere than captured" in found.watch.problems
