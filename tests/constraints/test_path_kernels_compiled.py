"""The kernels of paths compile for a Hopper GPU: what they take there, without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from canvas_grammar.decoding import path_kernels, paths_triton

from tests.support.children.compile_child import Case, compiled

# What may begin anywhere in a larger tensor, as the kernels themselves say.
ANYWHERE = paths_triton.ANYWHERE
MODULE = "canvas_grammar.decoding.paths_triton"
# 227 KiB, what a program of compute capability 9.0 may have (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED = 227 << 10
WARPS = {"num_warps": 4}
TABLES = {"rows": "*i64", "automata": "*i32", "classes": "*i32"}
WINDOW = dict.fromkeys(("first_of", "budget_of", "width_of"), "*i64")
FREE = dict.fromkeys(("forced_of", "likeliest_of", "drawn_of", "keys_of"), "*i64")
CHUNKS = {"by_chunk": "*fp32", "place_in_chunk": "*u8", "exact_in_chunk": "*fp32"}
LOGITS = {"chosen_logit": "*fp32", "top_logit": "*fp32"}
PATH = {"token": "*i64", "margin": "*fp32", "inside": "*i1", "after_end": "*i1"}
REST = {"states": "*i64", "feasible": "*i1"}


def strides(*names: str) -> dict[str, str]:
    return {f"{name}_stride": "i32" for name in names} | {"length": "i32"}


def second(both: bool, path: dict[str, str]) -> tuple[dict[str, str], dict[str, None]]:
    names = {f"second_{name}": kind for name, kind in path.items()}
    return (names, {}) if both else ({}, dict.fromkeys(names))


def read_case(kind: str, warm: bool) -> Case:
    types = {"logits": "*" + kind, "exact": "*" + kind, "reads": "*i64"}
    types |= dict.fromkeys(("canvas_stride", "row_stride", "read", "by_canvas"), "i32")
    types |= {"rows": "*i64", "classes": "*i32"} | WINDOW | FREE | CHUNKS | LOGITS
    types |= strides("chunks") | ({"temperature_of": "*fp32"} if warm else {})
    constants = {"BLOCK": path_kernels.CHUNKS} | ({} if warm else {"temperature_of": None})
    return Case(MODULE, "read_kernel", types, constants, (*ANYWHERE, "read", "by_canvas"), WARPS)


def weigh_case(warm: bool) -> Case:
    types = TABLES | WINDOW | {"forced_of": "*i64", "share_of": "*fp32", "by_chunk": "*fp32"}
    types |= {"top_logit": "*fp32"} | strides("chunks", "classes", "bundles", "labels")
    types |= dict.fromkeys(("by_class", "by_bundle", "by_label"), "*fp64")
    types |= {"temperature_of": "*fp32"} if warm else {}
    constants = {name: getattr(path_kernels, name) for name in ("GROUPS", "TERMS", "KINDS")}
    constants |= {} if warm else {"temperature_of": None}
    return Case(MODULE, "weigh_kernel", types, constants, ANYWHERE, WARPS)


def walk_case(both: bool) -> Case:
    types = {"rows": "*i64", "automata": "*i32", "state_of": "*i64", "keys_of": "*i64"} | WINDOW
    types |= strides("labels", "states") | {"label_of_path": "*i32"} | REST
    types |= dict.fromkeys(("by_label", "messages", "weight_of_path"), "*fp64")
    others, nothing = second(both, REST)
    constants = {"GROUPS": path_kernels.WALK_GROUPS, "TERMS": path_kernels.WALK_TERMS}
    constants |= {"EDGES": path_kernels.EDGES} | nothing
    options = {"num_warps": path_kernels.WALK_WARPS}
    return Case(MODULE, "walk_kernel", types | others, constants, ANYWHERE, options)


def choose_case(both: bool) -> Case:
    types = TABLES | WINDOW | FREE | CHUNKS | LOGITS | strides("chunks", "classes")
    types |= {"by_class": "*fp64", "label_of_path": "*i32"} | REST
    types |= {f"{name}_out": kind for name, kind in PATH.items()}
    others, nothing = second(both, PATH | REST)
    constants = {"BLOCK": path_kernels.MEMBERS} | nothing
    return Case(MODULE, "choose_kernel", types | others, constants, ANYWHERE, WARPS)


def cases() -> Iterator[tuple[str, Case]]:
    for kind, warm in (("bf16", False), ("fp32", True), ("fp16", True)):
        yield f"read {kind}", read_case(kind, warm)
    for both in (False, True):
        yield f"weigh {both}", weigh_case(both)
        yield f"walk {both}", walk_case(both)
        yield f"choose {both}", choose_case(both)


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu() -> None:
    """Without a GPU: it fits into shared memory and spills nothing."""
    found = compiled(dict(cases()))
    for name, takes in found.items():
        print(f"{name:14}{takes.registers:4} registers {takes.shared:7} B shared")
        assert takes.shared <= SHARED, name
        assert takes.spilled == takes.stack == 0, name
