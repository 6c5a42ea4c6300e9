"""Every kernel compiles for a Hopper GPU: what it takes there, without one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from canvas_grammar.decoding import path_kernels, paths_triton

from tests.support.children.compile_child import Case, compiled
from vllm_dllm.ops.attention import launch_triton
from vllm_dllm.ops.statistics import rows_triton, soft_embedding_triton

# 227 KiB, what a program of compute capability 9.0 may have (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED = 227 << 10
PATHS = "canvas_grammar.decoding.paths_triton"
ROWS = "vllm_dllm.ops.statistics.rows_triton"
SOFT = "vllm_dllm.ops.statistics.soft_embedding_triton"
ATTENTION = "vllm_dllm.ops.attention.kernel_triton"
# Numbers of which nobody knows that they are multiples of 16, and what may begin anywhere in a
# larger tensor, as the kernels themselves say.
UNALIGNED = {
    PATHS: (*paths_triton.ANYWHERE, "read", "by_canvas"),
    ROWS: ("rows", "first_id", "count", "forbidden", "splits", "tiles_per_split"),
    SOFT: ("rows", "first_id", "count", "first", "in_range", "steps_per_part"),
    ATTENTION: ("scale", "soft_cap", "width", "requests", "tiles_per_request", "splits"),
}
# The types of arguments that are not int32.
TYPES: dict[str, dict[str, str]] = {
    PATHS: {
        **dict.fromkeys(("rows", "reads", "state_of", "first_of", "budget_of"), "*i64"),
        **dict.fromkeys(("width_of", "forced_of", "likeliest_of", "drawn_of", "keys_of"), "*i64"),
        **dict.fromkeys(("token_out", "second_token", "states", "second_states"), "*i64"),
        **dict.fromkeys(("automata", "classes", "label_of_path"), "*i32"),
        **dict.fromkeys(("share_of", "temperature_of", "chosen_logit", "top_logit"), "*fp32"),
        **dict.fromkeys(("by_chunk", "exact_in_chunk", "margin_out", "second_margin"), "*fp32"),
        **dict.fromkeys(("by_class", "by_bundle", "by_label", "messages"), "*fp64"),
        "weight_of_path": "*fp64",
        "place_in_chunk": "*u8",
        **dict.fromkeys(("feasible", "second_feasible", "inside_out", "second_inside"), "*i1"),
        **dict.fromkeys(("after_end_out", "second_after_end"), "*i1"),
    },
    ROWS: {
        **dict.fromkeys(("temperature", "numbers", "forbidden_logit", "out"), "*fp32"),
        **{"keys": "*i64", "out_ids": "*i64", "ids": "*i32", "cap": "fp32"},
    },
    SOFT: {
        **dict.fromkeys(("temperature", "origin", "sums"), "*fp32"),
        **{"token": "*i64", "cap": "fp32"},
    },
    ATTENTION: {
        **dict.fromkeys(("out", "query"), "*bf16"),
        **dict.fromkeys(("partial_acc", "partial_best", "partial_total"), "*fp32"),
        **dict.fromkeys(("key_scale", "value_scale", "sinks"), "*fp32"),
        **dict.fromkeys(("table", "query_start", "seq_lens", "rule_block", "rule_window"), "*i32"),
        **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    },
}
DRAWN = ("temperature", "keys")


def case(
    module: str, kernel: str, constants: Mapping[str, Any], options: Mapping[str, int],
    **types: str,
) -> Case:  # fmt: skip
    """A kernel; of `constants`, those that it has."""
    names = inspect.signature(getattr(importlib.import_module(module), kernel).fn).parameters
    known = {name: constants[name] for name in names if name in constants}
    found = {n: (types | TYPES[module]).get(n, "i32") for n in names if n not in known}
    unaligned = [name for name in UNALIGNED[module] if name in found]
    return Case(module, kernel, found, known, unaligned, options)


def paths() -> Iterator[tuple[str, Case]]:
    second = [name for name in TYPES[PATHS] if name.startswith("second_")]
    warps, wide = {"num_warps": 4}, {"num_warps": path_kernels.WALK_WARPS}
    for kind, cold in (("bf16", {"temperature_of": None}), ("fp32", {}), ("fp16", {})):
        blocks = {"BLOCK": path_kernels.CHUNKS} | cold
        logits = {"logits": f"*{kind}", "exact": f"*{kind}"}
        yield f"read {kind}", case(PATHS, "read_kernel", blocks, warps, **logits)
    sizes = {name: getattr(path_kernels, name) for name in ("GROUPS", "TERMS", "KINDS", "EDGES")}
    walk = {"GROUPS": path_kernels.WALK_GROUPS, "TERMS": path_kernels.WALK_TERMS}
    for both in (False, True):
        only = {} if both else dict.fromkeys(second)
        cold = {} if both else {"temperature_of": None}
        yield f"weigh {both}", case(PATHS, "weigh_kernel", sizes | cold, warps)
        yield f"walk {both}", case(PATHS, "walk_kernel", sizes | walk | only, wide)
        members = {"BLOCK": path_kernels.MEMBERS} | only
        yield f"choose {both}", case(PATHS, "choose_kernel", members, warps)


def tiled(module: str, kernel: str, tile: Any, kind: str, nothing: tuple[str, ...] = ()) -> Case:
    """A kernel of row statistics with a tile."""
    sizes = {name.upper(): value for name, value in vars(tile).items()}
    constants = {**sizes, "EVEN": True, **dict.fromkeys(nothing)}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    pointers = dict.fromkeys(("source", "weight", "hidden", "weights", "embedding"), f"*{kind}")
    return case(module, kernel, constants, options, **pointers)


def statistics() -> Iterator[tuple[str, Case]]:
    for name in ("NARROW", "SLIM", "MIDDLE", "WIDE"):
        yield f"head {name}", tiled(ROWS, "rows_kernel", getattr(rows_triton, name), "bf16")
    yield "head WIDE greedy", tiled(ROWS, "rows_kernel", rows_triton.WIDE, "bf16", DRAWN)
    yield "head FLOAT32", tiled(ROWS, "rows_kernel", rows_triton.FLOAT32, "fp32")
    nothing = ("weight", "cap", *DRAWN)
    yield "rows", tiled(ROWS, "rows_kernel", rows_triton.IN_MEMORY, "bf16", nothing)
    merged = {"ROWS": 1, "SPLITS": 512, "DEPTH": 64}
    for name, cold in (("merge", dict.fromkeys(DRAWN)), ("merge and draw", {})):
        types = {"source": "*bf16", "weight": "*bf16"}
        yield name, case(ROWS, "merge_kernel", merged | cold, {"num_warps": 4}, **types)
    for name in ("MIDDLE", "WIDE"):
        tile = getattr(rows_triton, name)
        yield f"weights {name}", tiled(SOFT, "weights_kernel", tile, "bf16")
    yield "sum", tiled(SOFT, "sum_kernel", soft_embedding_triton.SumTile(), "bf16")
    yield "sum FLOAT32", tiled(SOFT, "sum_kernel", soft_embedding_triton.FLOAT32_SUM, "fp32")


def attention() -> Iterator[tuple[str, Case]]:
    """As a canvas of 256 tokens launches them, with float8 scales and sinks."""
    for name, kernel, size, stored in (
        *((f"attention {n}", "attention_kernel", n, "*bf16") for n in (64, 128, 256, 512)),
        ("attention float8", "attention_kernel", 128, "*fp8e4nv"),
        ("merge attention", "merge_kernel", 512, "*bf16"),
    ):
        tiles = launch_triton.default_tiles(size, 2, 4, 256)
        constants = {
            **{"HEADS": 16, "GROUP": 4, "HEAD": size, "HEAD_PADDED": size, "PAGE": 128},
            **{"ROWS": tiles.rows, "KEYS": tiles.keys, "SEARCH": False, "SPLIT": True},
            **{"WINDOWED": True, "CAPPED": False, "SPLITS": launch_triton.MAX_SPLITS},
        }
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        yield name, case(ATTENTION, kernel, constants, options, keys=stored, values=stored)


# Bytes of the stack that the accumulators of wide attention heads take.
STACKS = {"attention 256": 128, "attention 512": 256}
WGMMA = ("head MIDDLE", "head WIDE", "weights MIDDLE", "weights WIDE", "sum")
MATRIX = {
    **dict.fromkeys(WGMMA, "wgmma.mma_async"),
    **dict.fromkeys(("head NARROW", "head SLIM"), "mma.sync"),
}


@pytest.mark.slow
def test_every_kernel_fits_and_multiplies_where_it_should() -> None:
    """It fits into shared memory, and but for wide attention heads it spills nothing."""
    found = compiled(dict([*paths(), *statistics(), *attention()]))
    for name, takes in found.items():
        print(f"{name:18}{takes.registers:4} registers {takes.shared:7} B shared {takes.matrix}")
        assert takes.shared <= SHARED, name
        assert takes.stack <= STACKS.get(name, 0), name
        assert not takes.spilled or name in STACKS, name
        assert MATRIX.get(name, "") in (*takes.matrix, ""), name
        assert takes.matrix or not name.startswith("attention"), name
