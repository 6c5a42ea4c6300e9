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
from vllm_dllm.ops.statistics import rows_triton
from vllm_dllm.ops.statistics.rows_triton import MAX_SPLITS

# 227 KiB, what a program of compute capability 9.0 may have (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED = 227 << 10
PATHS = "canvas_grammar.decoding.paths_triton"
ROWS = "vllm_dllm.ops.statistics.rows_triton"
SOFT = "vllm_dllm.ops.statistics.soft_embedding_triton"
SCORES = "vllm_dllm.ops.statistics.scores_triton"
FILTERS = "vllm_dllm.ops.statistics.filters_triton"
ATTENTION = "vllm_dllm.ops.attention.kernel_triton"
# Numbers of which nobody knows that they are multiples of 16, and what may begin anywhere in a
# larger tensor, as the kernels themselves say.
UNALIGNED = {
    PATHS: (*paths_triton.ANYWHERE, "read", "by_canvas"),
    ROWS: ("rows", "first_id", "count", "forbidden", "splits", "tiles_per_split"),
    SOFT: ("first_id", "count"),
    SCORES: ("count",),
    FILTERS: ("count", "forbidden"),
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
        **{"keys": "*i64", "out_ids": "*i64", "ids": "*i32"},
    },
    SOFT: {
        **dict.fromkeys(("temperature", "origin"), "*fp32"),
        "token": "*i64",
    },
    SCORES: {"out": "*fp32"},
    FILTERS: {
        **dict.fromkeys(("temperature", "min_p", "top_p", "out"), "*fp32"),
        "top_k": "*i64",
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
    **types: Any,
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


# What rows of logits are read with, after the logits, their stride and the soft cap: `added`, the
# changes of canvases, the floor and the length of a canvas.
PLAIN = None, None, None, "i32"
CHANGES = ("*i32", "*fp32", "*u8", "*u8", "*i32", "*fp32")
OPTIONS = ("*i64", "*fp32"), CHANGES, "*fp32", "i32"


def statistics() -> Iterator[tuple[str, Case]]:
    for name in ("NARROW", "SLIM", "MIDDLE", "WIDE", "FLOAT32"):
        tile, kind = getattr(rows_triton, name), "*fp32" if name == "FLOAT32" else "*bf16"
        sizes = {"ROWS": tile.rows, "IDS": tile.ids, "DEPTH": tile.depth, "EVEN": True}
        nothing = dict.fromkeys(("of_scores", "temperature", "keys"))
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        source = (kind, "i32", kind, "i32", "i32", None)
        found = case(ROWS, "rows_kernel", sizes | nothing, options, of_product=source)
        yield f"head {name}", found
    tile = rows_triton.IN_MEMORY
    sizes = {"ROWS": 1, "IDS": tile.ids, "DEPTH": 16, "EVEN": True, "SPLITS": MAX_SPLITS}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    for name, rest, cold in (
        ("rows", PLAIN, dict.fromkeys(DRAWN)),
        ("draw", PLAIN, {}),
        ("rows with options", OPTIONS, dict.fromkeys(DRAWN)),
        ("draw with options", OPTIONS, {}),
    ):
        of_scores = ("*bf16", "i32", "fp32", *rest)
        constants = sizes | cold | {"of_product": None}
        for kernel, how in (("rows_kernel", options), ("merge_kernel", {"num_warps": 4})):
            yield f"{name}: {kernel}", case(ROWS, kernel, constants, how, of_scores=of_scores)
    for name, (added, changes, floor, _) in (("plain", PLAIN), ("options", OPTIONS)):
        given = {"cap": "fp32", "added": added, "changes": changes, "length": "i32"}
        for module, kernel, how in (
            (SCORES, "write_kernel", {"num_warps": 4}),
            (SOFT, "weights_kernel", {"num_warps": 4}),
            (FILTERS, "floors_kernel", {"num_warps": 8}),
        ):
            constants: dict[str, Any] = {"IDS": 1024 if module == FILTERS else 4096}
            types = given | {"floor": floor, "weights": "*bf16", "logits": "*bf16"}
            types = {name: kind for name, kind in types.items() if kind is not None}
            constants |= dict.fromkeys({"added", "changes", "floor"} - set(types))
            if module == FILTERS:
                types.pop("floor", None)
                constants["floor"] = None
            yield f"{kernel} {name}", case(module, kernel, constants, how, **types)


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
WGMMA = ("head MIDDLE", "head WIDE")
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
