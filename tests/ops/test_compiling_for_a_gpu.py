"""Every kernel compiles for a Hopper GPU: what it takes there, without one."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Any

import pytest

from tests.support.children.compile_child import Case, compiled
from vllm_dllm.ops.attention import launch_triton as attention
from vllm_dllm.ops.statistics import rows_triton, soft_embedding_triton

# 227 KiB, what a program of compute capability 9.0 may have (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED = 227 << 10
# The types of arguments by name, where they are neither int32 nor of the model's dtype.
TYPES = {
    **dict.fromkeys(("scale", "soft_cap", "cap"), "fp32"),
    **dict.fromkeys(("partial_acc", "partial_best", "partial_total"), "*fp32"),
    **dict.fromkeys(("key_scale", "value_scale", "sinks"), "*fp32"),
    **dict.fromkeys(("table", "query_start", "seq_lens", "rule_block", "rule_window"), "*i32"),
    **dict.fromkeys(("temperature", "numbers", "forbidden_logit", "sums", "origin"), "*fp32"),
    **dict.fromkeys(("keys", "out_ids", "token"), "*i64"),
    "ids": "*i32",
}
# Numbers that are not known to be multiples of 16.
ANY = {
    *("scale", "soft_cap", "cap", "requests", "tiles_per_request", "splits", "rows", "first_id"),
    *("count", "forbidden", "in_range", "tiles_per_split", "steps_per_part", "first"),
}
STATISTICS = "vllm_dllm.ops.statistics."


def case(
    module: str, name: str, constants: dict[str, Any], types: dict[str, str], tile: Any = None
) -> Case:
    """A kernel with arguments of the types that their names tell."""
    names = inspect.signature(getattr(importlib.import_module(module), name).fn).parameters
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: (TYPES | types).get(name, "i32") for name in names if name not in constants}
    unaligned = [name for name in types if name in ANY]
    options = {"num_warps": tile.warps, "num_stages": tile.stages} if tile else {"num_warps": 4}
    return Case(module, name, types, constants, unaligned, options)


def of_attention(name: str, size: int, stored: str = "*bf16") -> Case:
    """As a canvas of 256 tokens launches it, with float8 scales and sinks."""
    tile = attention.default_tiles(size, 2, 4, 256)
    constants = {
        **{"HEADS": 16, "GROUP": 4, "HEAD": size, "HEAD_PADDED": size, "PAGE": 128},
        **{"ROWS": tile.rows, "KEYS": tile.keys, "SEARCH": False, "SPLIT": True},
        **{"WINDOWED": True, "CAPPED": False, "SPLITS": attention.MAX_SPLITS},
    }
    types = {"out": "*bf16", "query": "*bf16", "keys": stored, "values": stored}
    found = case("vllm_dllm.ops.attention.kernel_triton", name, constants, types, tile)
    return replace(found, unaligned=[*found.unaligned, "width"])  # of a window, not of the model


def of_rows(name: str, tile: Any, kind: str = "*bf16", **constants: Any) -> Case:
    """A pass over the head or over logits, or what follows it."""
    sizes = {"ROWS": tile.rows, "IDS": tile.ids, "DEPTH": tile.depth, "EVEN": True}
    types = {"source": kind, "weight": kind, "out": "*fp32"}
    constants = {**sizes, "SPLITS": rows_triton.MAX_SPLITS, **constants}
    launched_as = tile if name == "rows_kernel" else None
    return case(STATISTICS + "rows_triton", name, constants, types, launched_as)


def of_embedding(name: str, tile: Any) -> Case:
    sizes = {"ROWS": tile.rows, "DEPTH": tile.depth, "EVEN": True}
    sizes |= {"IDS": getattr(tile, "ids", 0), "WIDTH": getattr(tile, "width", 0)}
    types = dict.fromkeys(("hidden", "weight", "weights", "embedding"), "*bf16")
    return case(STATISTICS + "soft_embedding_triton", name, sizes, types, tile)


# A greedy pass and a merge without a draw are part of what is here.
IN_MEMORY = {"weight": None, "cap": None, "temperature": None, "keys": None}
CASES = {
    **{f"attention {size}": of_attention("attention_kernel", size) for size in (128, 256, 512)},
    "attention float8": of_attention("attention_kernel", 128, "*fp8e4nv"),
    "attention merge": of_attention("merge_kernel", 512),
    **{
        f"head {name}": of_rows("rows_kernel", getattr(rows_triton, name))
        for name in ("NARROW", "SLIM", "MIDDLE", "WIDE")
    },
    "head FLOAT32": of_rows("rows_kernel", rows_triton.FLOAT32, "*fp32"),
    "rows": of_rows("rows_kernel", rows_triton.IN_MEMORY, **IN_MEMORY),
    "merge and draw": of_rows("merge_kernel", rows_triton.WIDE, ROWS=1),
    "weights": of_embedding("weights_kernel", rows_triton.WIDE),
    "sum": of_embedding("sum_kernel", soft_embedding_triton.SumTile()),
}
# Bytes of the stack that the widest accumulators of attention take; nothing else needs any.
STACKS = {"attention 256": 128, "attention 512": 256}
WGMMA = {"head MIDDLE", "head WIDE", "weights", "sum"}
MMA = {"head NARROW", "head SLIM"}


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu() -> None:
    """It fits into shared memory, spills nothing, and multiplies with the matrix units."""
    for name, takes in compiled(CASES).items():
        assert takes.shared <= SHARED, name
        assert takes.stack <= STACKS.get(name, 0), name
        assert takes.spilled == 0 or name in STACKS, name
        assert name not in WGMMA or "wgmma.mma_async" in takes.matrix, name
        assert name not in MMA or "mma.sync" in takes.matrix, name
        assert takes.matrix or not name.startswith("attention") or name.endswith("merge"), name
