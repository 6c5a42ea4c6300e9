"""LLaDA2 on every path of CUDA gives the tokens of the CPU backend.

A prefill chunk is cut into virtual sequences, whose number depends on the batch, so full graphs
may replay canvases only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from tests.support.cuda_paths.backends import BACKENDS, FLASH_2, FLASH_4, OURS, TRITON, Backend
from tests.support.cuda_paths.cases import LLADA2, MODES, TWO_BLOCKS, check, plain, run
from vllm_dllm.families.block_causal import attention

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Each backend, each mode and each scheduling at least once.
QUICK = {
    (FLASH_2, "FULL", "sync"),
    (FLASH_4, "FULL_AND_PIECEWISE", "async"),
    (TRITON, "NONE", "async"),
    (OURS, "FULL_DECODE_ONLY", "sync"),
}


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    return plain(LLADA2)


def cases() -> Iterator[object]:
    for case in product(BACKENDS, MODES, ("sync", "async")):
        marks = () if case in QUICK else pytest.mark.long
        yield pytest.param(*case, marks=marks, id="-".join(map(str, case)))


@pytest.mark.parametrize(("backend", "mode", "scheduling"), cases())
def test_same_tokens(tokens: list[list[int]], backend: Backend, mode: str, scheduling: str) -> None:
    found = run(LLADA2, backend, mode, scheduling == "async")
    check(found, tokens, "FULL_DECODE_ONLY" if mode == "FULL" else mode)
    assert found.watch.preempted > 0


@pytest.mark.parametrize(
    "backend",
    [Backend("FLASHINFER"), pytest.param(Backend("FLASH_ATTN", 3), marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.usefixtures("tokens")
def test_buffers_for_requests_are_refused(backend: Backend) -> None:
    """Some have an entry for each request only, and a prompt has more blocks than that."""
    with pytest.raises(
        (ValueError, RuntimeError), match=rf"--attention-backend {backend.name}: .*max_num_seqs"
    ):
        run(LLADA2, backend, "FULL_AND_PIECEWISE", asynchronous=True)


@pytest.mark.long
@pytest.mark.usefixtures("tokens")
def test_a_prompt_in_one_sequence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a prompt sees behind its blocks, as in a full graph of a mixed batch."""
    split = attention.split_into_blocks

    def whole(query_lengths: np.ndarray, block_length: int) -> tuple[np.ndarray, ...]:
        return split(query_lengths, int(query_lengths.max()))

    monkeypatch.setattr(attention, "split_into_blocks", whole)
    found = run(LLADA2, FLASH_2, "PIECEWISE", asynchronous=False)
    assert any("must see 0 to 31" in problem for problem in found.watch.problems)


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        pytest.param(
            *case,
            marks=() if case == (FLASH_4, "FULL_AND_PIECEWISE") else pytest.mark.long,
            id="-".join(map(str, case)),
        )
        for case in product(BACKENDS, ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"))
    ],
)
def test_windows_of_two_blocks(tokens: list[list[int]], backend: Backend, mode: str) -> None:
    """All canvases have queries of two blocks, for which one graph is enough, with padding too."""
    found = run(TWO_BLOCKS, backend, mode, asynchronous=True)
    check(found, tokens, mode)
    assert found.watch.preempted > 0
