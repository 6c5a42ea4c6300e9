"""Worker of test_kernels: run every kernel in Triton's interpreter and its stand-in, and compare.

Started as a script in the environment that `triton_interpreter.interpreter_env` makes, so that
vLLM has real kernels. A case draws a batch with awkward rows, calls vLLM's own wrapper function,
and returns every tensor that the kernel may have touched, poisoned before, so that a stand-in which
leaves one unwritten is caught. It is run twice with equal seeds:

- with the kernel, in the interpreter;
- with the stand-in, which has to give the same bytes (or, for float results, be close).

The result is one line of JSON on stdout.
"""

import importlib
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
import vllm_cpu_v2.import_hook  # noqa: F401
from vllm_cpu_v2 import plugin
from vllm_cpu_v2.launch import STAND_INS, KernelStandIn

importlib.import_module("vllm.v1.worker.cpu.shm")  # before any GPU module, as the worker does

from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch  # noqa: E402
from vllm.v1.worker.gpu.sample import logprob  # noqa: E402

CPU = torch.device("cpu")
POISON = -77
SEEDS = range(12)
FLOAT_SEEDS = range(2)  # interpreting a loop over the vocabulary is slow
Outputs = dict[str, torch.Tensor]


class Batch:
    """A random batch: R requests in S slots, with zero-length rows among them."""

    def __init__(self, rng: np.random.Generator, canvas: int = 8) -> None:
        self.canvas, self.slots = canvas, 12
        self.reqs = int(rng.integers(1, 9))
        self.idx = torch.from_numpy(rng.permutation(self.slots)[: self.reqs].astype(np.int64))
        lengths = rng.choice([0, 1, canvas, canvas, 13], self.reqs)
        lengths[rng.integers(self.reqs)] = canvas
        self.lengths = lengths.astype(np.int64)
        self.starts = running(self.lengths)
        self.tokens = int(self.lengths.sum())
        self.width = 64  # max_model_len
        self.prefill = ints(rng, 0, 40, self.slots)
        self.computed = ints(rng, 0, 40, self.slots)
        self.all_ids = ints(rng, 0, 1000, (self.slots, self.width))


def running(lengths: np.ndarray) -> torch.Tensor:
    """Running sum with a leading zero, int32."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def ints(
    rng: np.random.Generator, low: int, high: int, shape: Any, dtype: type = np.int32
) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, shape).astype(dtype))


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype)


def apply_write(rng: np.random.Generator) -> Outputs:
    """Staged writes to one table: matrix, vector and float, with repeated rows."""
    out = {}
    for name, size, dtype in (
        ("matrix", (7, 2100), torch.int32),
        ("vector", 7, torch.int64),
        ("float", (7, 9), torch.float32),
    ):
        table = buffer_utils.StagedWriteTensor(size, dtype, CPU)
        table.gpu.fill_(POISON)
        for row in rng.permutation(7)[:4]:
            if name == "vector":
                table.stage_write_elem(int(row), int(rng.integers(1 << 40)))
                continue
            width = size[1]
            start = int(rng.integers(0, width))
            length = int(rng.integers(0, width - start))
            table.stage_write(int(row), start, rng.integers(0, 99, length).tolist())
        table.apply_write()
        out[name] = table.gpu.clone()
    return out


def make_tables(rng: np.random.Generator, batch: Batch) -> Any:
    """Block tables of three groups with different page sizes, filled by staged writes."""
    tables = block_table.BlockTables([4, 16, 6], batch.slots, 128, [64, 16, 1100], CPU)
    for table in tables.block_tables:
        table.gpu.fill_(POISON)
    for table in tables.input_block_tables:
        table.fill_(POISON)
    tables.slot_mappings.fill_(POISON)
    for slot in range(batch.slots):
        tables.append_block_ids(
            slot, tuple(rng.integers(1, 99, n).tolist() for n in (3, 0, 30)), True
        )
        sizes = (61, 16, int(rng.choice([9, 1070])))
        tables.append_block_ids(slot, tuple(rng.integers(1, 99, n).tolist() for n in sizes), False)
    return tables


def apply_write_groups(rng: np.random.Generator) -> Outputs:
    """Staged writes to several tables at once, known to the kernel by address."""
    tables = make_tables(rng, Batch(rng))
    tables.apply_staged_writes()
    return {f"group{i}": t.gpu.clone() for i, t in enumerate(tables.block_tables)}


def gather_block_tables(rng: np.random.Generator) -> Outputs:
    """Rows in batch order; padding rows zeroed; what lies behind a row's blocks untouched."""
    batch = Batch(rng)
    tables = make_tables(rng, batch)
    for i, table in enumerate(tables.block_tables):
        table.gpu.copy_(ints(rng, 1, 99, table.gpu.shape))
        tables.num_blocks.np[i] = rng.integers(0, table.gpu.shape[1] + 1, batch.slots)
    tables.num_blocks.copy_to_uva()
    padded = int(rng.integers(batch.reqs, batch.slots + 1))
    tables.gather_block_tables(batch.idx, padded)
    return {f"group{i}": t.clone() for i, t in enumerate(tables.input_block_tables)}


def compute_slot_mappings(rng: np.random.Generator) -> Outputs:
    """Three groups, and padding."""
    batch = Batch(rng)
    tables = make_tables(rng, batch)
    for table in tables.block_tables:
        table.gpu.copy_(ints(rng, 1, 99, table.gpu.shape))
    positions = ints(rng, 0, 200, batch.tokens + 5, np.int64)
    for start, end in pairwise(batch.starts.tolist()):
        positions[start:end] = positions[start] + torch.arange(end - start)
    tables.compute_slot_mappings(batch.idx, batch.starts, positions, batch.tokens)
    return {"slots": tables.slot_mappings.clone()}


def prepare_prefill_inputs(rng: np.random.Generator) -> Outputs:
    """Prefill rows, finished rows, and canvases rolled back by r > 0."""
    batch = Batch(rng)
    for i, slot in enumerate(batch.idx.tolist()):
        if i % 2:  # rolled back to the block boundary below the prompt's end
            prompt = int(batch.prefill[slot])
            batch.computed[slot] = prompt - prompt % batch.canvas
    batch.prefill[batch.idx[0]], batch.computed[batch.idx[0]] = 40, 17
    ids, following = poisoned(128), poisoned(1, batch.slots)
    input_batch.prepare_prefill_inputs(
        ids, following, batch.idx, batch.starts, batch.all_ids, batch.prefill, batch.computed
    )
    return {"ids": ids}


def prepare_pos_seq_lens(rng: np.random.Generator) -> Outputs:
    """Positions, lengths and the zero padding of unused rows."""
    batch = Batch(rng)
    pos, seq_lens = poisoned(128, dtype=torch.int64), poisoned(batch.slots + 3)
    input_batch.prepare_pos_seq_lens(batch.idx, batch.starts, batch.computed, pos, seq_lens)
    return {"pos": pos, "seq_lens": seq_lens}


def combine_sampled_and_draft_tokens(rng: np.random.Generator) -> Outputs:
    """Canvases, some inside the prompt."""
    batch = Batch(rng)
    seq_lens = batch.computed[batch.idx] + torch.from_numpy(batch.lengths).int()
    limits = batch.prefill[batch.idx]
    num_logits = np.where(batch.lengths == batch.canvas, batch.canvas, 0)
    # a prompt that ends inside the row's logits, and one that ends exactly with the row
    batch.prefill[batch.idx[0]] = seq_lens[0] - 2
    batch.prefill[batch.idx[-1]] = seq_lens[-1] if rng.integers(2) else limits[-1]
    cu = running(num_logits)
    ids = poisoned(129)
    last = ints(rng, 0, 1000, (batch.slots, 1), np.int64)
    draft_tokens = ints(rng, 0, 1000, (batch.slots, batch.canvas), np.int64)
    indices = input_batch.combine_sampled_and_draft_tokens(
        ids, batch.idx, last, batch.starts, seq_lens, batch.prefill, draft_tokens, cu,
        int(cu[-1]), 0,
    )  # fmt: skip
    return {"ids": ids, "indices": indices}


def post_update(rng: np.random.Generator) -> Outputs:
    """Commits, denoising steps, skipped rows, rollbacks; with and without queries."""
    out = {}
    for name, queried in (("full", True), ("bare", False)):
        batch = Batch(rng)
        idx = batch.idx.clone()
        if batch.reqs > 1:
            idx[rng.integers(batch.reqs)] = -1
        total = ints(rng, 0, batch.width - batch.canvas, batch.slots)
        sampled = ints(rng, 0, 6, (batch.reqs, batch.canvas), np.int64)
        num_sampled = ints(rng, 0, batch.canvas + 1, batch.reqs)
        num_sampled[(idx >= 0).nonzero()[0]] = batch.canvas
        rejected = ints(rng, 0, batch.canvas, batch.reqs)  # r > 0 after the last prompt chunk
        last = poisoned(batch.slots, 1, dtype=torch.int64)
        input_batch.post_update(
            idx, batch.computed, last, None, sampled, num_sampled, rejected,
            batch.starts if queried else None, batch.all_ids, total,
        )  # fmt: skip
        touched = (batch.computed, last, batch.all_ids, total)
        out |= {f"{name}{i}": tensor for i, tensor in enumerate(touched)}
    return out


def post_update_num_computed_tokens(rng: np.random.Generator) -> Outputs:
    """Every request moves by its query length."""
    batch = Batch(rng)
    input_batch.post_update_num_computed_tokens(batch.idx, batch.computed, batch.starts)
    return {"computed": batch.computed}


def expand_idx_mapping(rng: np.random.Generator) -> Outputs:
    """Rows of logits per request, none for some."""
    batch = Batch(rng)
    total = int(batch.lengths.sum())
    expanded, local = input_batch.expand_idx_mapping(
        batch.idx, total, batch.starts, int(batch.lengths.max())
    )
    return {"expanded": expanded, "local": local}


def make_logits(rng: np.random.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider matrix, some entries equal, some minus infinity."""
    logits = torch.from_numpy(rng.normal(0, 6, (5, 2600)).astype(np.float32)).round(decimals=1)
    logits[:, rng.integers(0, 2500, 40)] = float("-inf")
    return logits.to(dtype)[:, :2500]


def topk_log_softmax(rng: np.random.Generator) -> Outputs:
    """Log-softmax at chosen ids, for every logits type, and with more ids than one tile."""
    out = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = make_logits(rng, dtype)
        for count in (1, 6, 1500):
            ids = ints(rng, 0, 2500, (5, count), np.int64)
            out[f"{dtype}{count}"] = logprob.compute_token_logprobs(logits, ids)
    return out


def ranks(rng: np.random.Generator) -> Outputs:
    """Ranks with ties, and of the largest and the smallest entry."""
    # Not in bfloat16, which the interpreter compares as bit patterns.
    out = {}
    for dtype in (torch.float32, torch.float16):
        logits = make_logits(rng, dtype)
        sampled = ints(rng, 0, 2500, 5, np.int64)
        sampled[0], sampled[1] = logits[0].argmax(), logits[1].nan_to_num(neginf=99).argmin()
        out[str(dtype)] = logprob.compute_topk_scores(logits, 0, sampled).selected_token_ranks
    return out


def fill_logprob_token_ids(rng: np.random.Generator) -> Outputs:
    """Requests with and without a list of their own, with and without a top k."""
    out = {}
    for topk in (0, 3):
        state = logprob.LogprobTokenIdsState(6, CPU)
        state.num_token_ids.np[:] = [0, 5, 0, 1, 7, 0]
        state.num_token_ids.copy_to_uva()
        state.token_ids.gpu.copy_(ints(rng, 0, 2500, state.token_ids.gpu.shape))
        idx = torch.from_numpy(rng.permutation(6)[:5].astype(np.int64))
        result = logprob.compute_topk_scores(
            make_logits(rng, torch.float32), topk, ints(rng, 0, 2500, 5, np.int64), None, state,
            idx, 7,
        )  # fmt: skip
        # A score of minus infinity is where the mask says "no such column".
        out |= {f"ids{topk}": result.logprob_token_ids, f"mask{topk}": result.logprobs.isinf()}
    return out


# By name: the module of the kernel, its stand-in, and the function that makes the outputs.
CASES: dict[str, tuple[str, Callable[..., None], Callable[[np.random.Generator], Outputs]]] = {
    function.__name__: (module, function, globals()[function.__name__])
    for module, functions in STAND_INS.items()
    for function in functions
}
CASES["apply_write_groups"] = (*CASES["apply_write"][:2], apply_write_groups)


def worst_difference(left: Outputs, right: Outputs) -> float:
    """The largest difference of any two numbers; infinite if NaN or another type is among them."""
    worst = 0.0
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        gap = torch.where(a == b, 0, (a.double() - b.double()).abs())  # -inf equals -inf
        worst = max(worst, float(gap.nan_to_num(nan=float("inf")).max()))
    return worst


def examine(name: str) -> dict[str, Any]:
    """Compare one kernel with its stand-in over all seeds."""
    module_name, function, case = CASES[name]
    module = importlib.import_module(f"vllm.v1.worker.gpu.{module_name}")
    kernel = getattr(module, f"_{function.__name__}_kernel")

    def run(seed: int, by: Any) -> Outputs:
        with mock.patch.object(module, f"_{function.__name__}_kernel", by):
            return {k: v.clone() for k, v in case(np.random.default_rng(seed)).items()}

    worst = 0.0
    for seed in FLOAT_SEEDS if module_name == "sample.logprob" else SEEDS:
        expected = run(seed, kernel)
        worst = max(worst, worst_difference(expected, run(seed, KernelStandIn(kernel, function))))
    return {"kind": type(kernel).__name__, "worst": worst}


def main() -> None:
    # Fills what torch.empty returns with NaN or the largest integer: the poison of outputs that
    # vLLM's wrappers allocate themselves.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    report: dict[str, Any] = {name: examine(name) for name in CASES}
    plugin.register()
    report["bridge"] = plugin.parts()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
