"""``dllm.kernels``: which kernels compute row statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CompilationMode

from vllm_dllm.engine import kernel_choice as rule
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout import make_readout
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.ops.statistics.head import Head

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = SimpleNamespace(has_plain_head=True, tiled_head=lambda: None)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the rule says."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(rule.logger, level, lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(rule, "HAS_TRITON", True)
    monkeypatch.setattr(rule, "_failures", lambda model, masked: [])
    return lines


def triton_works(model: Any = PLAIN) -> bool:
    return rule.triton_works(model, True, CUDA, 1)


def test_auto_takes_triton_on_cuda(log: list[str]) -> None:
    assert triton_works()
    assert len(log) == 1
    assert "by triton (dllm.kernels=auto: the self-test passed in 0." in log[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hip": "7.0"}, "no CUDA device"),
        ({"triton": False}, "vLLM has no Triton here"),
        ({"plain": False}, "the head is quantized, or more than a matrix"),
        ({"failures": ["head: token of 16 rows"]}, "the self-test failed"),
    ],
)
def test_auto_takes_torch_elsewhere(
    change: dict[str, Any], why: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", change.get("hip"))
    monkeypatch.setattr(rule, "HAS_TRITON", change.get("triton", True))
    failures = change.get("failures", [])
    monkeypatch.setattr(rule, "_failures", lambda model, masked: failures)
    model = SimpleNamespace(has_plain_head=change.get("plain", True), tiled_head=None)
    assert not triton_works(model)
    *failed, chosen = log
    assert failed == [f"dllm: Triton kernels failed their self-test: {one}" for one in failures]
    assert chosen == f"dllm: row statistics by torch (dllm.kernels=auto: {why})"


def test_a_kernel_that_does_not_run_fails() -> None:
    def no_head() -> None:
        raise RuntimeError("no kernel image")

    broken = SimpleNamespace(has_plain_head=True, tiled_head=no_head)
    assert rule._failures(broken, True) == ["RuntimeError: no kernel image"]


@pytest.mark.parametrize("mask", [0, None], ids=["masked", "noise"])
def test_the_readout_says_which_kernels_it_has(mask: int | None) -> None:
    """Catches a self-test on a GPU that took every Triton kernel for one of PyTorch's."""
    slots = SlotState(1, CanvasKind(4, 16, mask, aligned=True), CPU)
    head = Head(lambda hidden: hidden, 16, weight=torch.zeros(16, 8))
    model = SimpleNamespace(head=None, has_head=True, tiled_head=lambda: head)
    eager = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE, backend=""),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    made = [
        make_readout(model, slots, OptionalParts(slots, "raw_logprobs"), eager, kernels)
        for kernels in ("torch", "triton", "auto")
    ]
    assert [readout.triton for readout in made] == [False, True, False]
