"""What `vllm-dllm show-config` says of the memory of weights is what an engine's layers hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader import base_loader
from vllm.plugins import load_general_plugins

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY
from tests.support.engine import engine
from tests.support.packagings import CASES, packaged
from tests.support.quantized import FAMILIES, quantized
from vllm_dllm.commands import show_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OTHERS = ("plain", "online", "fp8-dynamic", "int8")
QUICK = {("gemma", "modelopt-nvfp4"), ("gemma", "w8a16"), ("llada2", "fp8-dynamic")}
FLAGS = ("--enforce-eager", "--max-model-len", "256")


def held(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of the parameters that each module has itself; a shared one counts once.

    Biases are those that vLLM adds to GPTQ's experts while it loads them.
    """
    seen: set[int] = set()
    found = {}
    for name, module in model.named_modules():
        own = [
            parameter
            for part, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in seen and not part.endswith("_bias")
        ]
        seen |= {id(parameter) for parameter in own}
        found[name] = sum(parameter.nbytes for parameter in own)
    return found


def shown(path: Path, *flags: str) -> tuple[float, float]:
    """Bytes on a GPU and on a CPU, as the command prints them."""
    load_general_plugins()
    lines = {name: value for name, value, _ in show_config.explain([str(path), *FLAGS, *flags])}
    gpu, cpu = (
        float(lines[f"weights on a {device}"].removesuffix(" GB")) * 1e9
        for device in ("GPU", "CPU")
    )
    return gpu, cpu


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=() if (family, case) in QUICK else pytest.mark.long)
        for family in FAMILIES
        for case in (*CASES, *OTHERS)
    ],
)
def test_within_one_percent(
    family: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before layers are prepared for their kernels they hold what they would on a GPU.

    A layer that has less afterwards keeps its matrix in a kernel's own packed copy.
    """
    loaded: dict[str, int] = {}
    prepare = base_loader.process_weights_after_loading

    def noting(model: torch.nn.Module, *rest: Any, **named: Any) -> None:
        loaded.update(held(model))
        prepare(model, *rest, **named)

    monkeypatch.setattr(base_loader, "process_weights_after_loading", noting)
    more: dict[str, Any] = {"quantization": "fp8"} if case == "online" else {}
    if case in CASES:
        path = packaged(tmp_path, family, case)
    elif case in ("plain", "online"):
        path = TINY / FAMILIES[family]
    else:
        path = quantized(tmp_path, family, {case: "Linear"})
    with engine(path, 32, **{**TEXT_ONLY_OPTIONS, "dtype": "bfloat16", **more}) as running:
        after = held(running.runner.model)
    flags = ["--dtype", "bfloat16", *(["--quantization", "fp8"] if more else [])]
    if family == "gemma":
        flags += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    gpu, cpu = shown(path, *flags)
    on_cpu = sum(max(size, after.get(name, 0)) for name, size in loaded.items())
    assert cpu == pytest.approx(on_cpu, rel=0.01)
    if case != "online":  # vLLM has not quantized anything by then
        assert gpu == pytest.approx(sum(loaded.values()), rel=0.01)
