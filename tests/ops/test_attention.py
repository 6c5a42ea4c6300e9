"""The attention kernel against the reference: every mask, awkward sizes, mixed batches.

Runs in Triton's interpreter where there is no GPU. `attention_cases` states the error budget.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.ops.attention_cases import (
    ALL_MASKS,
    AWKWARD,
    DEVICE,
    HALVES,
    SMALL,
    SPLIT,
    WINDOW,
    make_case,
)
from vllm_dllm.ops.attention import masks
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV
from vllm_dllm.ops.attention.masks import Mask, MaskRule


@pytest.mark.parametrize("mask", ALL_MASKS, ids=lambda mask: mask.name)
def test_each_mask_at_awkward_sizes(mask: Mask) -> None:
    make_case(AWKWARD, [mask] * len(AWKWARD)).check(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(mask, marks=pytest.mark.long if mask.name.startswith("causal") else ())
        for mask in ALL_MASKS
    ],
    ids=lambda mask: mask.name,
)
def test_each_mask_in_split_tiles(mask: Mask) -> None:
    make_case(AWKWARD, [mask] * len(AWKWARD)).check(HALVES)


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
    which = [ALL_MASKS[i] for i in (0, 1, 2, 0, 4, 5, 3)]
    make_case(lengths, which, page=page).check(tiles)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 48), (4, 4, 80), (8, 1, 64)])
def test_heads_and_dtypes(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """Groups that are no power of two, head sizes that are none, both low precisions."""
    lengths = ((33, 65), (32, 64), (5, 70))
    which = [masks.causal(), masks.block_causal(32), masks.bidirectional()]
    case = make_case(lengths, which, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype)
    case.check()
    case.check(SPLIT)


@pytest.mark.parametrize("size", [128, 256, 512])
def test_the_models_head_sizes(size: int) -> None:
    lengths = ((32, 160), (40, 40))
    which = [masks.bidirectional(), masks.causal()]
    make_case(lengths, which, size=size, dtype=torch.bfloat16, page=64).check()


@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=["whole", "split"])
def test_soft_cap_and_sinks(tiles) -> None:
    """Scores far beyond the cap; sinks that take nearly all, some and nearly nothing."""
    sinks = torch.tensor([5.0, 0.0, -5.0, -torch.inf], device=DEVICE)
    layer = AttentionLayer(scale=1.0, window_width=WINDOW, soft_cap=3.0, sinks=sinks)
    lengths = ((33, 63), (1, 31), (32, 96))
    which = [
        masks.window_causal(WINDOW),
        masks.window_symmetric(WINDOW),
        masks.window_reference(WINDOW),
    ]
    make_case(lengths, which, layer=layer).check(tiles)


@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_keys_and_values(dtype: torch.dtype, tiles) -> None:
    """The reference reads the same rounded numbers, so only the arithmetic differs."""
    case = make_case(((33, 63), (32, 96)), [masks.causal(), masks.block_causal(32)])
    scales = [torch.tensor([s], device=DEVICE) for s in (0.5, 1.5)]
    case.kv = PagedKV(case.kv.keys.to(dtype), case.kv.values.to(dtype), *scales)
    case.check(tiles)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    """A block rule of a sequence whose cached keys all lie outside the window."""
    case = make_case(((4, 40),), [masks.window_causal(4)])
    # Rows whose window is empty do not occur in a model; a sequence of no keys at all does,
    # while a graph is captured.
    case.queries = replace(case.queries, seq_lens=torch.zeros_like(case.queries.seq_lens))
    for tiles in (SMALL, SPLIT):
        assert torch.equal(case.run(tiles)[:4], torch.zeros_like(case.query[:4]))


def test_padding_of_a_uniform_batch_is_left_alone() -> None:
    """Under a CUDA graph requests of no token follow the real ones, with stale numbers."""
    case = make_case(((32, 64), (32, 96), (0, 500), (0, 7)), [masks.block_causal(32)] * 4)
    case.check(SMALL)
    case.check(SPLIT)


def test_other_strides() -> None:
    """Heads before slots, as vLLM lays its pages out for some backends, and padded queries."""
    case = make_case(((33, 63), (1, 31)), [masks.causal()] * 2)
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
    which = [masks.causal(), masks.block_causal(32), masks.bidirectional()]
    case = make_case(lengths, which)
    together = case.run(SMALL)
    queries = case.queries
    alone = replace(
        case,
        query=case.query[33:65],
        masks=which[1:2],
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
    case = make_case(((32, 256),), [masks.window_reference(33)], page=32)
    poisoned = case.queries.page_table[0, :7]
    case.check(SMALL)
    before = case.run(SMALL)
    case.queries.page_table[0, :6] = 1 << 30  # reading there would be far outside the pages
    assert len(poisoned) == 7
    assert torch.equal(case.run(SMALL)[:32], before[:32])


def test_offsets_beyond_32_bits() -> None:
    """Pages whose numbers times their stride exceed 2^31 elements."""
    case = make_case(((4, 20),), [masks.causal()], page=16, size=16)
    stride = 3 << 28
    rows = case.kv.keys.shape[0]
    if DEVICE == "cpu":
        # Untouched pages of an anonymous mapping take no memory.
        store = torch.empty(rows * stride, dtype=torch.float16)
    else:
        pytest.skip("needs an address space without memory behind it")
    at = (rows, 16, 2, 32)
    view = store.as_strided(at, (stride, 64, 32, 1))
    view.copy_(torch.cat([case.kv.keys, case.kv.values], -1))
    case.kv = PagedKV(view[..., :16], view[..., 16:])
    case.query = case.query.half()
    assert (rows - 1) * stride > 1 << 31
    case.check(SMALL)


def test_refusals() -> None:
    case = make_case(((4, 20),), [masks.causal()], heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="3 heads of 32 on 2 KV heads"):
        case.run()
