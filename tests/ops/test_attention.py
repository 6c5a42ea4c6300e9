"""The attention kernel against the reference: every mask, awkward sizes, mixed batches.

Runs in Triton's interpreter where there is no GPU.

The error budget is the error that the same computation in eager PyTorch in the same dtype has
against float64: the kernel's root mean square error may be as large and its largest error twice as
large. In float32, where sums run in another order, they may be 1.5 and 3 times as large (2.14 times
was seen on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.ops.attention import attention_reference
from tests.support.ops.interpreter import interpreted
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import WHOLE, MaskRule, WindowRule

kernel = interpreted("vllm_dllm.ops.attention.launch_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = 20
# Small tiles: several of each kind (masked, whole, masked again) in short sequences.
SMALL = kernel.Tiles(rows=32, keys=32, warps=4, stages=1, splits=1)
SPLIT = replace(SMALL, splits=4)
HALVES = replace(SMALL, splits=2)
# Tokens of the query and of the whole sequence.
AWKWARD = ((1, 1), (31, 31), (33, 63), (63, 129), (129, 129), (0, 0), (1, 130), (31, 32))


@dataclass
class Case:
    """A batch in pages whose unused slots are NaN, and the rules of its masks."""

    query: torch.Tensor
    kv: PagedKV
    queries: QueryBatch
    layer: AttentionLayer

    @property
    def tokens(self) -> int:
        return int(self.queries.query_start[-1])

    def run(self, tiles=None) -> torch.Tensor:
        out = torch.full_like(self.query, torch.nan)
        kernel.paged_attention(self.query, self.kv, self.queries, self.layer, out, tiles)
        return out

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        found = attention_reference(self.query, self.kv, self.queries, self.layer, dtype)
        return found[: self.tokens].double()

    def check(self, tiles=None) -> torch.Tensor:
        """Within the budget, every row of a query written, no other row touched."""
        out, dtype = self.run(tiles), self.query.dtype
        assert out[self.tokens :].isnan().all(), "a row of no query was written"
        found, truth = out[: self.tokens].double(), self.reference(torch.float64)
        assert found.isfinite().all(), "a row was not written"
        error, budget = found - truth, self.reference(dtype) - truth
        exact = dtype == torch.float32
        floor = torch.finfo(dtype).eps * truth.abs().max() / 8
        assert rms(error) <= (1.5 if exact else 1.0) * rms(budget) + floor
        assert error.abs().max() <= (3 if exact else 2) * budget.abs().max() + floor
        return out


def rms(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean().sqrt()


def make_case(
    lengths,
    which: list[MaskRule],
    *,
    width: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    layer: AttentionLayer | None = None,
) -> Case:
    """Random numbers for requests of the given (query tokens, sequence tokens) and rules."""
    generator = torch.Generator().manual_seed(0)
    rows, pages = len(lengths), max(-(-end // page) for _, end in lengths) + 1
    # Pages in no order; two more than are used.
    table = torch.randperm(rows * pages + 2, generator=generator)[: rows * pages].view(rows, pages)
    store = torch.full((rows * pages + 2, page, kv_heads, 2 * size), torch.nan)
    for row, (_, end) in enumerate(lengths):
        numbers = torch.randn(pages * page, kv_heads, 2 * size, generator=generator)
        numbers[end:] = torch.nan
        store[table[row]] = numbers.view(pages, page, kv_heads, -1)
    store = store.to(DEVICE, dtype)
    start = torch.tensor([0, *(query for query, _ in lengths)]).cumsum(0)
    query = torch.randn(int(start[-1]) + 3, heads, size, generator=generator)
    rule = MaskRule(*torch.tensor(which, dtype=torch.int32, device=DEVICE).T.contiguous())
    queries = QueryBatch(
        start.int().to(DEVICE),
        torch.tensor([end for _, end in lengths], dtype=torch.int32, device=DEVICE),
        table.int().to(DEVICE),
        rule,
        max_query_len=max(query for query, _ in lengths),
        max_seq_len=max(end for _, end in lengths),
    )
    kv = PagedKV(store[..., :size], store[..., size:])
    layer = layer or AttentionLayer(size**-0.5, width)
    return Case(query.to(DEVICE, dtype), kv, queries, layer)


CAUSAL, BLOCKS, BIDIRECTIONAL = (MaskRule(n, WindowRule.NONE) for n in (1, 32, WHOLE))
WINDOW_CAUSAL = MaskRule(1, WindowRule.SYMMETRIC)
WINDOW_SYMMETRIC = MaskRule(WHOLE, WindowRule.SYMMETRIC)
WINDOW_REFERENCE = MaskRule(WHOLE, WindowRule.REFERENCE)
ALL_RULES = (CAUSAL, BLOCKS, BIDIRECTIONAL, WINDOW_CAUSAL, WINDOW_SYMMETRIC, WINDOW_REFERENCE)


@pytest.mark.parametrize(
    "tiles", [SMALL, pytest.param(HALVES, marks=pytest.mark.slow)], ids=["whole", "split"]
)
@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: f"{rule.block}-{rule.window.name}")
def test_each_mask_at_awkward_sizes(rule: MaskRule, tiles) -> None:
    width = 0 if rule.window == WindowRule.NONE else WINDOW
    make_case(AWKWARD, [rule] * len(AWKWARD), width=width).check(tiles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "tiles"),
    [
        pytest.param(16, SPLIT, id="16-split", marks=pytest.mark.long),
        (32, SMALL),
        (32, SPLIT),
        (128, None),
    ],
)
def test_all_rules_in_one_batch(page: int, tiles) -> None:
    """Causal prompts, block-causal ones and canvases of both window rules side by side.

    On a layer with a window the rules without one are what a global layer's would be.
    """
    lengths = ((33, 63), (32, 96), (63, 63), (0, 0), (31, 129), (40, 200), (1, 31))
    which = [ALL_RULES[i] for i in (0, 1, 2, 0, 4, 5, 3)]
    make_case(lengths, which, width=WINDOW, page=page).check(tiles)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 48), (4, 4, 80), (8, 1, 64)])
def test_heads_and_dtypes(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """Groups that are no power of two, head sizes that are none, both low precisions."""
    lengths = ((33, 65), (32, 64), (5, 70))
    which = [CAUSAL, BLOCKS, BIDIRECTIONAL]
    case = make_case(lengths, which, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype)
    case.check()
    case.check(SPLIT)


@pytest.mark.parametrize("size", [128, 256, 512])
def test_the_models_head_sizes(size: int) -> None:
    lengths = ((32, 160), (40, 40))
    which = [BIDIRECTIONAL, CAUSAL]
    make_case(lengths, which, size=size, dtype=torch.bfloat16, page=64).check()


@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=["whole", "split"])
def test_soft_cap_and_sinks(tiles) -> None:
    """Scores far beyond the cap; sinks that take nearly all, some and nearly nothing."""
    sinks = torch.tensor([5.0, 0.0, -5.0, -torch.inf], device=DEVICE)
    layer = AttentionLayer(scale=1.0, window_width=WINDOW, soft_cap=3.0, sinks=sinks)
    lengths = ((33, 63), (1, 31), (32, 96))
    make_case(lengths, list(ALL_RULES[3:]), layer=layer).check(tiles)


@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_keys_and_values(dtype: torch.dtype, tiles) -> None:
    """The reference reads the same rounded numbers, so only the arithmetic differs."""
    case = make_case(((33, 63), (32, 96)), [CAUSAL, BLOCKS])
    scales = [torch.tensor([s], device=DEVICE) for s in (0.5, 1.5)]
    case.kv = PagedKV(case.kv.keys.to(dtype), case.kv.values.to(dtype), *scales)
    case.check(tiles)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    """A block rule of a sequence whose cached keys all lie outside the window."""
    case = make_case(((4, 40),), [WINDOW_CAUSAL], width=4)
    # Rows whose window is empty do not occur in a model; a sequence of no keys at all does,
    # while a graph is captured.
    case.queries = replace(case.queries, seq_lens=torch.zeros_like(case.queries.seq_lens))
    for tiles in (SMALL, SPLIT):
        assert torch.equal(case.run(tiles)[:4], torch.zeros_like(case.query[:4]))


def test_padding_of_a_uniform_batch_is_left_alone() -> None:
    """Under a CUDA graph requests of no token follow the real ones, with stale numbers."""
    case = make_case(((32, 64), (32, 96), (0, 500), (0, 7)), [BLOCKS] * 4)
    case.check(SMALL)
    case.check(SPLIT)


def test_other_strides() -> None:
    """Heads before slots, as vLLM lays its pages out for some backends, and padded queries."""
    case = make_case(((33, 63), (1, 31)), [CAUSAL] * 2)
    store = torch.cat([case.kv.keys, case.kv.values], -1).transpose(1, 2).contiguous()
    store = store.transpose(1, 2)
    size = case.kv.keys.shape[-1]
    case.kv = PagedKV(store[..., :size], store[..., size:])
    wide = torch.empty(*case.query.shape[:2], 2 * size, device=DEVICE)
    wide[..., :size] = case.query
    case.query = wide[..., :size]
    case.check(SMALL)


def test_results_do_not_depend_on_the_batch() -> None:
    """Bit for bit the same alone and among others, as long as the tiles are."""
    lengths = ((33, 63), (32, 96), (63, 129))
    which = [CAUSAL, BLOCKS, BIDIRECTIONAL]
    case = make_case(lengths, which)
    together = case.run(SMALL)
    queries = case.queries
    alone = replace(
        case,
        query=case.query[33:65],
        queries=replace(
            queries,
            query_start=queries.query_start[1:3] - 33,
            seq_lens=queries.seq_lens[1:2],
            page_table=queries.page_table[1:2],
            rule=MaskRule(queries.rule.block[1:2], queries.rule.window[1:2]),
        ),
    )
    assert torch.equal(alone.run(SMALL)[:32], together[33:65])


def test_tiles_without_work_are_never_read() -> None:
    """Poison in every page that no query may see; a tile that is read and masked would show it."""
    case = make_case(((32, 256),), [WINDOW_REFERENCE], width=33, page=32)
    case.check(SMALL)
    before = case.run(SMALL)
    case.queries.page_table[0, :6] = 1 << 30  # reading there would be far outside the pages
    assert torch.equal(case.run(SMALL)[:32], before[:32])


@pytest.mark.skipif(DEVICE != "cpu", reason="needs an address space without memory behind it")
def test_offsets_beyond_32_bits() -> None:
    """Pages whose numbers times their stride exceed 2^31 elements."""
    case = make_case(((4, 20),), [CAUSAL], page=16, size=16)
    stride = 3 << 28
    rows = case.kv.keys.shape[0]
    # Untouched pages of an anonymous mapping take no memory.
    store = torch.empty(rows * stride, dtype=torch.float16)
    view = store.as_strided((rows, 16, 2, 32), (stride, 64, 32, 1))
    view.copy_(torch.cat([case.kv.keys, case.kv.values], -1))
    case.kv = PagedKV(view[..., :16], view[..., 16:])
    case.query = case.query.half()
    assert (rows - 1) * stride > 1 << 31
    case.check(SMALL)


def test_refusals() -> None:
    case = make_case(((4, 20),), [CAUSAL], heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="3 heads of 32 on 2 KV heads"):
        case.run()


# ---------------------------------------------------------------- how kernels are launched


def test_keys_are_split_where_programs_are_few() -> None:
    """By shape alone: a window bounds the keys, a short sequence is left whole."""
    case = make_case(((4, 20),), [CAUSAL])
    far = replace(case.queries, max_seq_len=32768)
    assert kernel._splits(33, far, case.layer) == 32
    assert kernel._splits(3, far, case.layer) == 2
    assert kernel._splits(0, far, case.layer) == 1
    assert kernel._splits(33, replace(far, max_seq_len=300), case.layer) == 1
    assert kernel._splits(33, far, AttentionLayer(1.0, window_width=1024)) == 8
