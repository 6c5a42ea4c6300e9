"""Every kernel of row statistics compiles for a Hopper GPU: what it takes there, without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.children.compile_child import Case, compiled
from vllm_dllm.ops.statistics import rows_triton, soft_embedding_triton

# 227 KiB, what a program of compute capability 9.0 may have (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED = 227 << 10
STATISTICS = "vllm_dllm.ops.statistics."
UNKNOWN = ("rows", "first_id", "count", "forbidden", "splits", "in_range")
UNKNOWN += ("tiles_per_split", "steps_per_part")
PER_ROW = {"temperature": "*fp32", "keys": "*i64"}
STATES = {"numbers": "*fp32", "ids": "*i32", "forbidden_logit": "*fp32"}
FOUND = {"out": "*fp32", "out_ids": "*i64"}
NOTHING = {"temperature": None, "keys": None}


def of_head(kind: str, name: str = "source") -> dict[str, str]:
    strides = {f"{name}_stride": "i32", "weight_stride": "i32", "width": "i32", "cap": "fp32"}
    return {name: "*" + kind, "weight": "*" + kind, **strides}


def of_ids(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


IDS = of_ids("rows", "first_id", "count", "forbidden")


def head_case(kind: str, tile: object, draws: bool = True) -> Case:
    types = of_head(kind) | STATES | IDS | of_ids("tiles_per_split")
    types |= PER_ROW if draws else {}
    constants = {"ROWS": tile.rows, "IDS": tile.ids, "DEPTH": tile.depth, "EVEN": True}
    constants |= {} if draws else NOTHING
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Case(STATISTICS + "rows_triton", "rows_kernel", types, constants, UNKNOWN, options)


def rows_case(kind: str) -> Case:
    tile = rows_triton.IN_MEMORY
    types = {"source": "*" + kind, "source_stride": "i32"} | STATES | IDS
    types |= of_ids("tiles_per_split", "width", "weight_stride")
    constants = {"ROWS": tile.rows, "IDS": tile.ids, "DEPTH": tile.depth, "EVEN": True}
    constants |= {"weight": None, "cap": None, **NOTHING}
    options = {"num_warps": tile.warps}
    return Case(STATISTICS + "rows_triton", "rows_kernel", types, constants, UNKNOWN, options)


def merge_case(kind: str, draws: bool) -> Case:
    types = of_head(kind) | STATES | FOUND | IDS | of_ids("splits")
    types |= PER_ROW if draws else {}
    constants = {"ROWS": 1, "SPLITS": 512, "DEPTH": 64} | ({} if draws else NOTHING)
    options = {"num_warps": 4}
    return Case(STATISTICS + "rows_triton", "merge_kernel", types, constants, UNKNOWN, options)


def weights_case(kind: str, tile: object) -> Case:
    types = of_head(kind, "hidden") | {"temperature": "*fp32", "origin": "*fp32", "token": "*i64"}
    types |= {"weights": "*" + kind} | of_ids(
        "weights_stride", "rows", "first", "count", "first_id"
    )
    constants = {"ROWS": tile.rows, "IDS": tile.ids, "DEPTH": tile.depth, "EVEN": True}
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


def cases() -> Iterator[tuple[str, Case]]:
    for name in ("NARROW", "SLIM", "MIDDLE", "WIDE"):
        yield f"head {name}", head_case("bf16", getattr(rows_triton, name))
    yield "head WIDE greedy", head_case("bf16", rows_triton.WIDE, draws=False)
    yield "head FLOAT32", head_case("fp32", rows_triton.FLOAT32)
    yield "merge", merge_case("bf16", draws=False)
    yield "merge and draw", merge_case("bf16", draws=True)
    yield "weights MIDDLE", weights_case("bf16", rows_triton.MIDDLE)
    yield "weights WIDE", weights_case("bf16", rows_triton.WIDE)
    yield "sum", sum_case("bf16", soft_embedding_triton.SumTile())
    yield "sum FLOAT32", sum_case("fp32", soft_embedding_triton.FLOAT32_SUM)
    yield "rows", rows_case("bf16")


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
