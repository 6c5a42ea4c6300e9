"""The checks of this folder find planted faults, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.support.cuda_paths.backends import flag_edges
from tests.support.cuda_paths.expected import ExpectedKeys
from tests.support.cuda_paths.graphs import FullGraph
from tests.support.cuda_paths.reference import KernelCall, problems
from tests.support.cuda_paths.watch import Watch
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import (
    WHOLE,
    MaskRule,
    QuerySpan,
    WindowRule,
    bidirectional,
    causal,
    window_causal,
    window_symmetric,
)
from vllm_dllm.ops.attention.reference import attention_reference

PAGE, WINDOW = 16, 12
# A causal prompt of 20 tokens, and a canvas of 8 behind 30 tokens.
SPANS = (QuerySpan(0, 20), QuerySpan(30, 38))
RULES = (MaskRule(1, WindowRule.SYMMETRIC), MaskRule(WHOLE, WindowRule.SYMMETRIC))
EXPECTED = ExpectedKeys(SPANS, RULES)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def right_call(window: int = 0) -> KernelCall:
    """What a backend with one causal flag for each request hands to its kernel."""
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(8, PAGE, 2, 4, generator=draw) for _ in range(2))
    query = torch.randn(28, 4, 4, generator=draw)
    return KernelCall(
        query=query,
        keys=keys,
        values=values,
        out=torch.zeros_like(query),
        query_start=int32(0, 20, 28),
        seq_lens=int32(20, 38),
        page_table=torch.stack([int32(5, 2, 0), int32(7, 1, 3)]),
        max_query_len=20,
        max_seq_len=38,
        scale=0.5,
        soft_cap=0.0,
        edges=flag_edges(int32(1, 0), window - 1, window - 1),
        window=window,
    )


@pytest.mark.parametrize(
    ("window", "masks"),
    [
        (0, (causal(), bidirectional())),
        (WINDOW, (window_causal(WINDOW), window_symmetric(WINDOW))),
    ],
)
def test_a_right_call_has_no_problem_and_is_computed(window: int, masks: tuple) -> None:
    call, watch = right_call(window), Watch()
    watch.expected = EXPECTED
    watch.attends(call)
    assert watch.problems == []
    rules = MaskRule(None, None)
    batch = QueryBatch(call.query_start, call.seq_lens, call.page_table, rules, 20, 38)
    layer = AttentionLayer(call.scale, window)
    kv = PagedKV(call.keys, call.values)
    torch.testing.assert_close(call.out, attention_reference(call.query, kv, batch, layer, masks))


FAULTS = {
    "a canvas with the flag of a prompt": (
        {"edges": flag_edges(int32(1, 1), -1, -1)},
        "token 20 at position 30 sees keys 0 to 30; it is at 30 and must see 0 to 37",
    ),
    "a prompt with the flag of a canvas": (
        {"edges": flag_edges(int32(0, 0), -1, -1)},
        "token 0 at position 0 sees keys 0 to 19; it is at 0 and must see 0 to 0",
    ),
    "a window that ends before the canvas does": (
        {"edges": flag_edges(int32(1, 0), -1, 5)},
        "token 20 at position 30 sees keys 0 to 35",
    ),
    "keys that the canvas hides": ({"seq_lens": int32(20, 37)}, "token 20 at position 29"),
    "two queries in each other's place": (
        {"query_start": int32(0, 8, 28)},
        "token 0 at position 12",
    ),
    "a query that was forgotten": ({"query_start": int32(0, 20)}, "28 tokens, but queries of 20"),
    "a query that ends behind the batch": (
        {"query_start": int32(0, 20, 29)},
        "queries end at token 29 of 28",
    ),
    "a query longer than promised": ({"max_query_len": 19}, "a query of 20 tokens, promised"),
    "a sequence longer than promised": ({"max_seq_len": 37}, "a sequence of 38 tokens, promised"),
    "a page table without the last row": (
        {"page_table": int32(5, 2, 0)[None]},
        "2 sequences, but 1 rows of pages",
    ),
    "lengths without the last one": ({"seq_lens": int32(20)}, "2 sequences, but 1 lengths"),
    "a page table that is too narrow": (
        {"page_table": torch.stack([int32(5, 2), int32(7, 1)])},
        "a sequence of 38 tokens, but 2 pages of 16",
    ),
    "a page that is not in the cache": (
        {"page_table": torch.stack([int32(5, 2, 0), int32(7, 1, 8)])},
        "pages [7, 1, 8] of a cache of 8",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_call_is_a_problem(fault: str) -> None:
    changes, problem = FAULTS[fault]
    found = list(problems(replace(right_call(), **changes), EXPECTED))
    assert any(problem in text for text in found), found


def test_a_window_with_one_edge_is_a_problem() -> None:
    """The causal window of a prompt, kept for a canvas."""
    call = replace(right_call(WINDOW), edges=flag_edges(int32(1, 0), WINDOW - 1, 0))
    assert any("must see 19 to 37" in text for text in problems(call, EXPECTED))


def test_a_prompt_of_two_blocks_in_one_sequence_is_a_problem() -> None:
    """LLaDA2's virtual sequences, missing."""
    blocks = ExpectedKeys((QuerySpan(0, 20), QuerySpan(32, 40)), (MaskRule(8, 0),) * 2)
    call = replace(right_call(), seq_lens=int32(20, 40), max_seq_len=40)
    right = replace(
        call,
        query_start=int32(0, 8, 16, 20, 28),
        seq_lens=int32(8, 16, 20, 40),
        page_table=call.page_table[[0, 0, 0, 1]],
        edges=flag_edges(False, -1, -1),
    )
    assert list(problems(right, blocks)) == []
    wrong = replace(call, edges=flag_edges(False, -1, -1))
    assert "token 0 at position 0 sees keys 0 to 19" in "".join(problems(wrong, blocks))


def test_padding_that_is_stored_is_a_problem() -> None:
    watch = Watch()
    watch.expected = EXPECTED
    slots = torch.arange(32)
    slots[28:] = -1
    watch.stores(slots)
    assert watch.problems == []
    slots[30] = 0
    watch.stores(slots)
    slots[3] = -1
    watch.stores(slots)
    assert watch.problems == [
        "padding behind token 28 is stored in the KV cache",
        "tokens are missing in the KV cache",
    ]


@dataclass
class Metadata:
    lengths: torch.Tensor
    rule: MaskRule
    causal: bool = True
    max_seq_len: int = 64


def test_a_replay_that_a_graph_would_not_see_is_a_problem() -> None:
    """Tensors elsewhere or of another shape, and numbers other than the captured ones."""
    lengths, block, window = int32(3, 4, 5), int32(1, 1, 1), int32(0, 0, 0)
    watch, runs = Watch(), []
    graph = FullGraph(watch)

    def replay(metadata: Metadata, **inputs: torch.Tensor) -> list[str]:
        watch.problems.clear()
        watch.metadata, watch.inputs = {"layer": metadata, "other": metadata}, inputs
        graph.replay()
        return watch.problems

    captured = Metadata(lengths, MaskRule(block, window))
    watch.metadata = {"layer": captured, "other": captured}
    watch.inputs = {"embeddings": lengths}
    graph.capture(runs.append)
    # The same memory, and a lower bound: right.
    again = Metadata(lengths[:], MaskRule(block[:], window), max_seq_len=9)
    assert replay(again, embeddings=lengths) == []
    assert replay(Metadata(lengths.clone(), again.rule), embeddings=lengths) == [
        "a full graph: lengths: elsewhere than captured"
    ]
    assert replay(Metadata(lengths[:2], again.rule), embeddings=lengths) == [
        "a full graph: lengths: (2,), captured as (3,)"
    ]
    fresh = MaskRule(block, window.clone())
    assert replay(Metadata(lengths, fresh), embeddings=lengths) == [
        "a full graph: rule.window: elsewhere than captured"
    ]
    assert replay(Metadata(lengths, again.rule, causal=False), embeddings=lengths) == [
        "a full graph: causal: False, captured as True"
    ]
    assert replay(again, embeddings=lengths.clone()) == [
        "a full graph's inputs: embeddings: elsewhere than captured"
    ]
    assert runs == [CUDAGraphMode.NONE] * 6
