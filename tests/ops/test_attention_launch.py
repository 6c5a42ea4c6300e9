"""How the attention kernels are launched, and what they take of a GPU."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import pytest

from tests.support.children.compile_child import Case as Compiled
from tests.support.children.compile_child import compiled
from tests.support.ops.attention_cases import SMALL, SPLIT, kernel, make_case
from vllm_dllm.ops.attention import masks
from vllm_dllm.ops.attention.inputs import AttentionLayer


def test_the_kernel_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the reference, and the merge exactly where keys were split."""
    launched = []
    for name in ("attention_kernel", "merge_kernel"):
        original = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, Counted(name, original, launched))
    case = make_case(((33, 63),), [masks.causal()])
    case.run(SMALL)
    assert launched == ["attention_kernel"]
    case.run(SPLIT)
    assert launched[1:] == ["attention_kernel", "merge_kernel"]


@dataclass
class Counted:
    """A kernel whose launches are written down."""

    name: str
    kernel: object
    launched: list[str]

    def __getitem__(self, grid):
        self.launched.append(self.name)
        return self.kernel[grid]


def compile_case(name: str, size: int, stored: str) -> Compiled:
    """A kernel as a canvas of 256 tokens launches it, with float8 scales and sinks."""
    tiles = kernel.default_tiles(size, 2, 4, 256)
    constants = {
        **{"HEADS": 16, "GROUP": 4, "HEAD": size, "HEAD_PADDED": size, "PAGE": 128},
        **{"ROWS": tiles.rows, "KEYS": tiles.keys, "SEARCH": False, "SPLIT": True},
        **{"WINDOWED": True, "CAPPED": False, "SPLITS": kernel.MAX_SPLITS},
    }
    types = {
        **dict.fromkeys(("out", "query"), "*bf16"),
        **dict.fromkeys(("keys", "values"), stored),
        **dict.fromkeys(("partial_acc", "partial_best", "partial_total"), "*fp32"),
        **dict.fromkeys(("key_scale", "value_scale", "sinks"), "*fp32"),
        **dict.fromkeys(("table", "query_start", "seq_lens"), "*i32"),
        **dict.fromkeys(("rule_block", "rule_window"), "*i32"),
        **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    }
    names = inspect.signature(getattr(kernel, name).fn).parameters
    return Compiled(
        "vllm_dllm.ops.attention.kernel_triton",
        name,
        {name: types.get(name, "i32") for name in names if name not in constants},
        {name: constants[name] for name in names if name in constants},
        unaligned=[
            name
            for name in ("scale", "soft_cap", "width", "requests", "tiles_per_request", "splits")
            if name in names
        ],
        options={"num_warps": tiles.warps, "num_stages": tiles.stages},
    )


@pytest.mark.slow
def test_it_compiles_for_a_gpu() -> None:
    """For sm_90, without one: shared memory and registers within what a program may have."""
    # Bytes of the stack that the widest accumulators take.
    stacks = {64: 0, 128: 0, 256: 128, 512: 256}
    cases = {f"{size}": compile_case("attention_kernel", size, "*bf16") for size in stacks}
    cases["128 float8"] = compile_case("attention_kernel", 128, "*fp8e4nv")
    cases["merge"] = compile_case("merge_kernel", 512, "*bf16")
    found = compiled(cases)
    for name, used in found.items():
        assert used.shared <= 227 << 10, name
        assert used.stack <= stacks.get(int(name.split()[0]) if name != "merge" else 64, 0), name
        assert used.matrix or name == "merge", f"{name}: the matrix units are not used"


def test_keys_are_split_where_programs_are_few() -> None:
    """By shape alone: a window bounds the keys, a short sequence is left whole."""
    case = make_case(((4, 20),), [masks.causal()])
    far = replace(case.queries, max_seq_len=32768)
    assert kernel._splits(33, far, case.layer) == 32
    assert kernel._splits(3, far, case.layer) == 2
    assert kernel._splits(0, far, case.layer) == 1
    assert kernel._splits(33, replace(far, max_seq_len=300), case.layer) == 1
    assert kernel._splits(33, far, AttentionLayer(1.0, window_width=1024)) == 8
