"""LLaDA2 and DiffusionGemma on every path of CUDA give the tokens of the CPU backend.

LLaDA2 cuts a prefill chunk into virtual sequences, whose number depends on the batch, so full
graphs may replay canvases only. A batch of DiffusionGemma has one causal flag for each request,
which FlashAttention has from version 4 on, and which Triton's and our kernel take in full graphs of
mixed batches, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from tests.support.cuda_paths.backends import BACKENDS, FLASH_2, FLASH_4, OURS, TRITON, Backend
from tests.support.cuda_paths.cases import (
    GEMMA,
    LLADA2,
    MODES,
    TWO_BLOCKS,
    Model,
    check,
    plain,
    run,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# In a window of two blocks all canvases have queries of two blocks, for which one graph is enough,
# with padding, too.
MODELS = {"llada2": LLADA2, "two blocks": TWO_BLOCKS, "gemma": GEMMA}
# Of both models each backend, each scheduling, and together each mode.
QUICK = {
    ("llada2", FLASH_2, "FULL", "sync"),
    ("llada2", FLASH_4, "FULL_AND_PIECEWISE", "async"),
    ("llada2", TRITON, "NONE", "async"),
    ("llada2", OURS, "FULL_DECODE_ONLY", "sync"),
    ("two blocks", FLASH_4, "FULL_AND_PIECEWISE", "async"),
    ("gemma", TRITON, "FULL", "async"),
    ("gemma", FLASH_4, "FULL_DECODE_ONLY", "sync"),
    ("gemma", OURS, "PIECEWISE", "async"),
}


def cases() -> Iterator[object]:
    every = (
        *product(["llada2"], BACKENDS, MODES, ("sync", "async")),
        *product(["two blocks"], BACKENDS, MODES[1:4], ("async",)),
        *product(["gemma"], BACKENDS[1:], MODES, ("sync", "async")),
    )
    for case in every:
        marks = () if case in QUICK else pytest.mark.long
        yield pytest.param(*case, marks=marks, id="-".join(map(str, case)))


@cache
def tokens(name: str) -> list[list[int]]:
    """What the CPU backend answers, in one block for each canvas."""
    return plain(GEMMA if name == "gemma" else LLADA2)


@pytest.mark.parametrize(("name", "backend", "mode", "scheduling"), cases())
def test_same_tokens(name: str, backend: Backend, mode: str, scheduling: str) -> None:
    # First, because an engine must have run before, see `cuda_paths`.
    wanted = tokens(name)
    found = run(MODELS[name], backend, mode, scheduling == "async")
    lowered = mode == "FULL" and (name, backend) != ("gemma", TRITON)
    check(found, wanted, "FULL_DECODE_ONLY" if lowered else mode)
    assert found.watch.preempted > 0 or name == "gemma"


@pytest.mark.parametrize(
    ("model", "backend", "reason"),
    [
        # Some of its buffers have an entry for each request only, and a prompt has more blocks.
        (LLADA2, Backend("FLASHINFER"), "--attention-backend FLASHINFER: it has not been tried"),
        (
            GEMMA,
            Backend("FLASH_ATTN", 3),
            "--attention-backend FLASH_ATTN: .*FlashAttention 3 has no causal flag",
        ),
        # By vLLM, before our start-up.
        (GEMMA, Backend("FLASHINFER"), "FlashInfer does not support DiffusionGemma's mixed"),
    ],
    ids=str,
)
def test_a_backend_that_cannot_serve_the_model_is_refused(
    model: Model, backend: Backend, reason: str
) -> None:
    tokens("llada2")
    with pytest.raises((ValueError, RuntimeError), match=reason):
        run(model, backend, "FULL_AND_PIECEWISE", asynchronous=True)
