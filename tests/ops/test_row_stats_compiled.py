"""Every kernel of row statistics compiles for a Hopper GPU: what it takes there, without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.children.compile_child import Case, compiled
from vllm_dllm.ops.statistics import head_triton, rows_triton, soft_embedding_triton

# 227 KiB, what a program of compute capability 9.0 may have (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED = 227 << 10
STATISTICS = "vllm_dllm.ops.statistics."
UNKNOWN = ("rows", "first_id", "count", "forbidden", "splits", "vocabulary", "in_range")
UNKNOWN += ("tiles_per_split", "steps_per_part")
PER_ROW = {"temperature": "*fp32", "keys": "*i64"}
STATES = {"numbers": "*fp32", "ids": "*i32", "forbidden_logit": "*fp32"}
FOUND = {"out": "*fp32", "out_ids": "*i64"}
EVERYTHING = {"TEMPERED": True, "NOISE": True}


def of_head(kind: str) -> dict[str, str]:
    strides = {"hidden_stride": "i32", "weight_stride": "i32", "width": "i32", "cap": "fp32"}
    return {"hidden": "*" + kind, "weight": "*" + kind, **strides}


def of_ids(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def head_case(kind: str, tile: object, **wanted: bool) -> Case:
    types = of_head(kind) | PER_ROW | STATES | of_ids("rows", "first_id", "count", "forbidden")
    constants = {"ROWS": tile.rows, "IDS": tile.ids, "DEPTH": tile.depth, "EVEN": True}
    wanted = {"CAPPED": True, **EVERYTHING, **wanted}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    types |= of_ids("tiles_per_split")
    return Case(
        STATISTICS + "head_triton", "head_kernel", types, constants | wanted, UNKNOWN, options
    )


def head_draw_case(kind: str) -> Case:
    types = of_head(kind) | PER_ROW | STATES | FOUND
    types |= of_ids("rows", "first_id", "count", "forbidden", "splits")
    constants = {"ROWS": 1, "SPLITS": 512, "DEPTH": 64, "EVEN": True, "CAPPED": True, **EVERYTHING}
    options = {"num_warps": 4}
    return Case(STATISTICS + "head_triton", "head_draw_kernel", types, constants, UNKNOWN, options)


def weights_case(kind: str, tile: object) -> Case:
    types = of_head(kind) | {"temperature": "*fp32", "origin": "*fp32", "token": "*i64"}
    types |= {"weights": "*" + kind} | of_ids(
        "weights_stride", "rows", "first", "count", "first_id"
    )
    constants = {"ROWS": tile.rows, "IDS": tile.ids, "DEPTH": tile.depth}
    constants |= {"CAPPED": True, "EVEN": True}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    unknown = (*UNKNOWN, "first")
    return Case(
        STATISTICS + "soft_embedding_triton", "weights_kernel", types, constants, unknown, options
    )


def sum_case(kind: str, tile: object) -> Case:
    types = {"weights": "*" + kind, "embedding": "*" + kind, "sums": "*fp32"}
    types |= of_ids(
        "weights_stride", "embedding_stride", "rows", "width", "first", "in_range", "steps_per_part"
    )
    constants = {"ROWS": tile.rows, "WIDTH": tile.width, "DEPTH": tile.depth, "EVEN": True}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    unknown = (*UNKNOWN, "first")
    return Case(
        STATISTICS + "soft_embedding_triton", "sum_kernel", types, constants, unknown, options
    )


def rows_case(kind: str, kernel: str) -> Case:
    types = {"logits": "*" + kind, "stride": "i32"} | PER_ROW | STATES
    types |= of_ids("rows", "vocabulary", "forbidden")
    tile = rows_triton.RowTile()
    constants = {"ROWS": tile.rows, "IDS": tile.ids, **EVERYTHING}
    options = {"num_warps": tile.warps}
    if kernel == "draw_kernel":
        types |= FOUND | of_ids("splits")
        constants, options = {"ROWS": tile.draw_rows, "SPLITS": 64, **EVERYTHING}, {"num_warps": 2}
    else:
        types |= of_ids("tiles_per_split")
    return Case(STATISTICS + "rows_triton", kernel, types, constants, UNKNOWN, options)


def cases() -> Iterator[tuple[str, Case]]:
    for name in ("NARROW", "SLIM", "MIDDLE", "WIDE"):
        yield f"head {name}", head_case("bf16", getattr(head_triton, name))
    yield "head WIDE greedy", head_case("bf16", head_triton.WIDE, TEMPERED=False, NOISE=False)
    yield "head FLOAT32", head_case("fp32", head_triton.FLOAT32)
    yield "head draw", head_draw_case("bf16")
    yield "weights MIDDLE", weights_case("bf16", head_triton.MIDDLE)
    yield "weights WIDE", weights_case("bf16", head_triton.WIDE)
    yield "sum", sum_case("bf16", soft_embedding_triton.SumTile())
    yield "sum FLOAT32", sum_case("fp32", soft_embedding_triton.FLOAT32_SUM)
    yield "rows", rows_case("bf16", "rows_kernel")
    yield "rows draw", rows_case("bf16", "draw_kernel")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu() -> None:
    """Without a GPU: it fits into shared memory, spills nothing, and multiplies where it should."""
    found = compiled(dict(cases()))
    for name, takes in found.items():
        print(f"{name:18}{takes.registers:4} registers {takes.shared:7} B shared {takes.matrix}")
        assert takes.shared <= SHARED, name
        assert takes.spilled == takes.stack == 0, name
    for name in ("head MIDDLE", "head WIDE", "weights MIDDLE", "weights WIDE", "sum"):
        assert "wgmma.mma_async" in found[name].matrix, name
    for name in ("head NARROW", "head SLIM"):
        assert "mma.sync" in found[name].matrix, name
