"""The CPU stand-ins against the Triton kernels themselves, and what only the stand-ins promise."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_cpu_v2 import batch_kernels, logprob_kernels, table_kernels
from vllm_cpu_v2.launch import STAND_INS, KernelMismatchError, KernelStandIn

HERE = Path(__file__).parent
INTERPRETER = runpy.run_path(str(HERE / "triton_interpreter.py"))

# Float outputs are float32 log-probabilities below 64 in size. Kernel and stand-in each round
# two subtractions (2 * 3.8e-6) and the logarithm of a sum over the vocabulary, taken in another
# order; everything else has to be equal to the bit.
FLOAT_KERNELS = {"topk_log_softmax"}
FLOAT_TOLERANCE = 2e-5

CASES = [
    "apply_write",
    "apply_write_groups",
    *(
        path.rsplit("._", 1)[1].removesuffix("_kernel")
        for path in STAND_INS
        if "apply_write" not in path
    ),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of run_kernel_cases.py, run once with Triton's interpreter."""
    pytest.importorskip("triton")
    pytest.importorskip("vllm")
    env = INTERPRETER["interpreter_env"](tmp_path_factory.mktemp("triton") / "backend")
    done = subprocess.run(
        [sys.executable, str(HERE / "run_kernel_cases.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_stand_in_equals_kernel(report: dict[str, Any], name: str) -> None:
    """Same seeds, same inputs, same bytes; close for float results."""
    result = report[name]
    assert result["kinds"] == ["InterpretedFunction"], "the reference was not Triton's interpreter"
    assert result["no_kernel_noticed"], "this case would not notice a kernel that does nothing"
    if name in FLOAT_KERNELS:
        assert result["worst"] <= FLOAT_TOLERANCE
    else:
        assert result["equal"], result


def test_report_is_complete_and_poisoned(report: dict[str, Any]) -> None:
    """Every stand-in has a case, and outputs allocated by vLLM's wrappers began as NaN."""
    assert report.keys() == {*CASES, "poison"}
    assert report["poison"]
    assert len(CASES) == len(STAND_INS) + 1  # staged writes have two forms


# ------------------------------------------------------------ beyond the kernels


def test_rolled_back_canvas_near_the_end_copies_what_exists() -> None:
    """A canvas that reaches past max_model_len takes the row's rest and leaves the others."""
    ids = torch.full((10,), -7, dtype=torch.int32)
    following = torch.full((2, 2), -7, dtype=torch.int32)
    tokens = torch.arange(20, dtype=torch.int32).reshape(2, 10)  # two slots, max_model_len 10
    batch_kernels.prepare_prefill_inputs(
        (1,), ids, following, 2, torch.tensor([0]), torch.tensor([0, 8]), tokens,
        torch.tensor([9, 9]), torch.tensor([6, 6]), 2,
    )  # fmt: skip
    assert ids.tolist() == [6, 7, 8, 9] + [-7] * 6
    assert following.tolist() == [[0, -7], [0, -7]]
    # and from the last slot, where nothing at all lies behind the row
    batch_kernels.prepare_prefill_inputs(
        (1,), ids, following, 2, torch.tensor([1]), torch.tensor([0, 8]), tokens,
        torch.tensor([9, 10]), torch.tensor([6, 9]), 2,
    )  # fmt: skip
    assert ids.tolist()[:2] == [19, 7]


def test_commit_past_the_end_spares_the_neighbour() -> None:
    """The surplus of a last canvas is dropped; lengths count all of it."""
    tokens = torch.zeros(2, 6, dtype=torch.int32)
    total, computed = torch.tensor([4, 0]), torch.tensor([4, 0])
    last = torch.zeros(2, 1, dtype=torch.int64)
    batch_kernels.post_update(
        (1,), torch.tensor([0]), computed, last, None, torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([4]), torch.tensor([0]), torch.tensor([0, 4]), tokens, total,
    )  # fmt: skip
    assert tokens.tolist() == [[0, 0, 0, 0, 1, 2], [0] * 6]
    assert (total.tolist(), computed.tolist(), last[0].item()) == ([8, 0], [8, 0], 4)


@pytest.mark.parametrize("size,interleave", [(2, 1), (2, 2), (3, 4)])
def test_slot_mappings_with_context_parallelism(size: int, interleave: int) -> None:
    """Against a plain loop over tokens, for each rank and for a group that is not sharded."""
    rng = np.random.default_rng(size)
    block, slots, width, tokens = 12, 3, 9, 40
    tables = [torch.from_numpy(rng.integers(1, 50, (slots, width), dtype=np.int32)) for _ in "ab"]
    idx, starts = torch.tensor([2, -1, 0]), torch.tensor([0, 15, 20, tokens])
    pos = torch.from_numpy(rng.integers(0, width * block, tokens))
    for rank in range(size):
        out = torch.full((2, tokens + 3), -77)
        table_kernels.compute_slot_mappings(
            (2, 4), tokens + 3, idx, starts, pos,
            torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64),
            torch.tensor([width, width]), torch.tensor([block, block]),
            torch.tensor([True, True]), torch.tensor([True, False]), out,
            rank, size, interleave, -1,
        )  # fmt: skip
        for group, sharded in enumerate((True, False)):
            expected = [-1] * (tokens + 3)
            for t in range(tokens):
                request = int(idx[0 if t < 15 else 1 if t < 20 else 2])
                at, here = int(pos[t]), True
                if sharded:
                    number, offset = divmod(at, block * size)
                    here = offset // interleave % size == rank
                    at = number * block + offset // (interleave * size) * interleave
                    at += offset % interleave
                if here and request >= 0:
                    entry = int(tables[group][request, at // block])
                    expected[t] = entry * block + at % block
            assert out[group].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_within_budget_of_float64(dtype: torch.dtype) -> None:
    """Log-softmax and ranks against float64, with chunks that do not divide the rows."""
    torch.manual_seed(0)
    rows, vocab = 37, 60_000  # 17 rows a chunk
    logits = (torch.randn(rows, vocab) * 5).to(dtype)
    ids = torch.randint(vocab, (rows, 4))
    out = torch.full((rows, 4), float("nan"))
    logprob_kernels.topk_log_softmax((rows,), out, logits, ids, 4, vocab)
    exact = logits.double().log_softmax(1).gather(1, ids)
    assert (out.double() - exact).abs().max() <= FLOAT_TOLERANCE
    places = torch.full((rows,), -7)
    logprob_kernels.ranks((rows,), places, logits, ids[:, 0], vocab, 8192)
    chosen = logits.double().gather(1, ids[:, :1])
    assert places.tolist() == (logits.double() >= chosen).sum(1).tolist()


# ----------------------------------------------------------------------- binding


def _kernel(a_ptr: Any, BLOCK_SIZE: Any, b: Any = 3) -> None:  # noqa: N803
    """A kernel as Triton's placeholder leaves it: a plain function."""


def test_arguments_are_bound_by_name() -> None:
    """Order, defaults, tiling arguments and launch options."""
    seen: list[Any] = []
    stand_in = KernelStandIn(_kernel, lambda grid, b, a_ptr: seen.append((grid, a_ptr, b)))
    stand_in[(2,)]("x", BLOCK_SIZE=4, num_warps=1)
    stand_in[(4,)](a_ptr="y", BLOCK_SIZE=4, b=5)
    assert seen == [((2,), "x", 3), ((4,), "y", 5)]


def test_changed_signatures_are_refused_by_name() -> None:
    with pytest.raises(KernelMismatchError, match=r"unknown arguments \['b'\]"):
        KernelStandIn(_kernel, lambda grid, a_ptr: None)
    with pytest.raises(KernelMismatchError, match=r"missing arguments \['c_ptr'\]"):
        KernelStandIn(_kernel, lambda grid, a_ptr, b, c_ptr: None)


def test_flat_writes_refuse_scattered_memory() -> None:
    """A silent copy would lose the write."""
    with pytest.raises(ValueError, match="contiguous"):
        table_kernels.flat_view(torch.zeros(4, 4)[:, ::2])
