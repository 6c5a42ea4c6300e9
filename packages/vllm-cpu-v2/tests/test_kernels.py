"""The CPU stand-ins against the Triton kernels themselves, and what only the stand-ins promise."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.core.errors import TypingError
from vllm_cpu_v2 import kernels
from vllm_cpu_v2.launch import STAND_INS, KernelMismatchError, KernelStandIn

HERE = Path(__file__).parent
INTERPRETER = runpy.run_path(str(HERE / "triton_interpreter.py"))

# Float outputs are float32 log-probabilities below 64 in size. Kernel and stand-in each round
# two subtractions (2 * 3.8e-6) and the logarithm of a sum over the vocabulary, taken in another
# order; everything else has to be equal to the bit.
FLOAT_KERNELS = {"topk_log_softmax"}
FLOAT_TOLERANCE = 2e-5

CASES = [
    "apply_write_groups",
    *(function.__name__ for functions in STAND_INS.values() for function in functions),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of kernel_cases.py, run once with Triton's interpreter."""
    pytest.importorskip("triton")
    pytest.importorskip("vllm")
    env = INTERPRETER["interpreter_env"](tmp_path_factory.mktemp("triton") / "backend")
    done = subprocess.run(
        [sys.executable, str(HERE / "kernel_cases.py")],
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
    assert result["kind"] == "InterpretedFunction", "the reference was not Triton's interpreter"
    assert result["worst"] <= (FLOAT_TOLERANCE if name in FLOAT_KERNELS else 0)


def test_real_triton_keeps_the_bridge_away(report: dict[str, Any]) -> None:
    """With a working Triton only torchvision may need help."""
    assert set(report["bridge"]) <= {"torchvision-schemas"}


# ------------------------------------------------------------ beyond the kernels


def call(function: Any, grid: tuple[int, ...], *args: Any) -> None:
    """Call a compiled function as `KernelStandIn` does, with arrays in place of tensors."""
    function(grid, *(arg.numpy() if isinstance(arg, torch.Tensor) else arg for arg in args))


def test_rolled_back_canvas_near_the_end_copies_what_exists() -> None:
    """A canvas that reaches past max_model_len takes the row's rest and leaves the others."""
    prepare, ids = kernels.prepare_prefill_inputs, torch.full((10,), -7, dtype=torch.int32)
    tokens = torch.arange(20, dtype=torch.int32).reshape(2, 10)  # two slots, max_model_len 10
    starts, limits, computed = torch.tensor([0, 8]), torch.tensor([9, 10]), torch.tensor([6, 9])
    call(prepare, (1,), ids, torch.tensor([0]), starts, tokens, limits, computed)
    assert ids.tolist() == [6, 7, 8, 9] + [-7] * 6
    # and from the last slot, where nothing at all lies behind the row
    call(prepare, (1,), ids, torch.tensor([1]), starts, tokens, limits, computed)
    assert ids.tolist()[:2] == [19, 7]


def test_commit_past_the_end_spares_the_neighbour() -> None:
    """The surplus of a last canvas is dropped; lengths count all of it."""
    tokens = torch.zeros(2, 6, dtype=torch.int32)
    total, computed = torch.tensor([4, 0]), torch.tensor([4, 0])
    last = torch.zeros(2, 1, dtype=torch.int64)
    call(
        kernels.post_update, (1,),
        torch.tensor([0]), computed, last, None, torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([4]), torch.tensor([0]), torch.tensor([0, 4]), tokens, total,
    )  # fmt: skip
    assert tokens.tolist() == [[0, 0, 0, 0, 1, 2], [0] * 6]
    assert (total.tolist(), computed.tolist(), last[0].item()) == ([8, 0], [8, 0], 4)


def test_pages_that_no_query_sees_are_the_null_page() -> None:
    """As vLLM 0.33 asks for it: of a group with a window, and of no other."""
    source = torch.arange(1, 13, dtype=torch.int32).reshape(2, 6)  # two slots, pages 1 to 12
    read, out = torch.zeros(3, 6, dtype=torch.int32), torch.full((3, 6), -7, dtype=torch.int32)

    def addresses(*tables: torch.Tensor) -> torch.Tensor:
        return torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)

    call(
        kernels.gather_block_tables, (2, 3),
        torch.tensor([1, 0]), addresses(source, source), addresses(read, out),
        torch.tensor([6, 6]), torch.full((2, 2), 6), 2, torch.tensor([7, 21]),
        torch.tensor([0, 8]), torch.tensor([4, 4]), True,
    )  # fmt: skip
    whole = [list(range(7, 13)), list(range(1, 7)), [0] * 6]
    assert read.tolist() == whole
    # 21 - 8 tokens are 3 whole pages; 7 tokens are all in reach.
    assert out.tolist() == [[0, 0, 0, 10, 11, 12], *whole[1:]]


def test_drafts_of_a_later_stage_are_kept() -> None:
    """As vLLM 0.33 passes them: row by row, and none of a skipped row."""
    zeros, drafts = torch.zeros(2, dtype=torch.int64), torch.tensor([[1, 2], [3, 4]])
    kept = torch.full((2, 2), -7)
    call(
        kernels.post_update, (2,),
        torch.tensor([1, -1]), zeros, zeros, None, drafts, zeros, zeros, None,
        torch.zeros(2, 6, dtype=torch.int32), zeros, drafts, kept,
    )  # fmt: skip
    assert kept.tolist() == [[-7, -7], [1, 2]]


def test_what_no_diffusion_model_needs_is_not_computed_otherwise() -> None:
    """Context parallelism, bonus tokens and penalties."""
    one, table = torch.tensor([0]), torch.zeros(1, 4, dtype=torch.int32)
    addresses = torch.tensor([table.data_ptr()], dtype=torch.uint64)
    starts, places = torch.tensor([0, 4]), torch.arange(4)
    with pytest.raises(AssertionError):
        call(
            kernels.compute_slot_mappings, (1, 2), 4,
            one, starts, places, addresses, one, one, one, table, 2, -1,
        )  # fmt: skip
    with pytest.raises(AssertionError):
        call(
            kernels.combine_sampled_and_draft_tokens, (1,),
            places, one, starts, one, one, table, starts, places, 1,
        )  # fmt: skip
    with pytest.raises(AssertionError):
        call(kernels.post_update, (1,), *[one] * 4, table, *[one] * 2, starts, table, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_within_budget_of_float64(dtype: torch.dtype) -> None:
    """Log-softmax and ranks against float64."""
    torch.manual_seed(0)
    rows, vocab = 37, 60_000
    logits = (torch.randn(rows, vocab) * 5).to(dtype)
    ids = torch.randint(vocab, (rows, 4))
    out = torch.full((rows, 4), float("nan"))
    kernels.topk_log_softmax((rows,), out, logits, ids)
    exact = logits.double().log_softmax(1).gather(1, ids)
    assert (out.double() - exact).abs().max() <= FLOAT_TOLERANCE
    places = torch.full((rows,), -7)
    kernels.ranks((rows,), places, logits, ids[:, 0])
    chosen = logits.double().gather(1, ids[:, :1])
    assert places.tolist() == (logits.double() >= chosen).sum(1).tolist()


# ----------------------------------------------------------------------- binding


def _kernel(a_ptr: Any, a_stride: Any, b: Any, BLOCK_SIZE: Any) -> None:  # noqa: N803
    """A kernel as Triton's placeholder leaves it: a plain function."""


def test_arguments_are_bound_by_name() -> None:
    """Order, tiling arguments and launch options."""
    seen: list[Any] = []
    stand_in = KernelStandIn(_kernel, lambda grid, b, a_ptr: seen.append((grid, a_ptr, b)))
    stand_in[(2,)]("x", 1, b=3, BLOCK_SIZE=4, num_warps=1)
    stand_in[(4,)](a_ptr="y", a_stride=1, b=5, BLOCK_SIZE=4)
    assert seen == [((2,), "x", 3), ((4,), "y", 5)]
    # Another version of the kernel has one more.
    KernelStandIn(_kernel, lambda grid, a_ptr, b, later=7: seen.append(later))[(2,)]("x", 1, 3, 4)
    assert seen[2] == 7


def test_changed_signatures_are_refused_by_name() -> None:
    with pytest.raises(KernelMismatchError, match=r"unknown arguments \['b'\]"):
        KernelStandIn(_kernel, lambda grid, a_ptr: None)
    with pytest.raises(KernelMismatchError, match=r"missing arguments \['c_ptr'\]"):
        KernelStandIn(_kernel, lambda grid, a_ptr, b, c_ptr: None)


def test_writes_to_scattered_memory_are_refused() -> None:
    """A silent copy would lose the last token."""
    one = torch.tensor([0])
    table = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(TypingError, match="contiguous"):
        call(
            kernels.post_update, (1,),
            one, one, torch.zeros(4, 4)[:, :3], None, table, one, one, None, table, one,
        )  # fmt: skip
