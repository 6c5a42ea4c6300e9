"""Checkpoints as several tools package them, through vLLM's own layers and a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.engines.test_quantized import (
    HALF,
    check_experts,
    encoded,
    experts_of,
    linear_layers,
    solved,
)
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_SDAR
from tests.support.engine import Engine, engine, greedy
from tests.support.packagings import CASES, dequantized, layers_in, matrices, packaged
from tests.support.reference_fast_dllm import random_checkpoint as random_fast_dllm
from tests.support.reference_nemotron import random_checkpoint as random_nemotron
from tests.support.reference_sdar import random_checkpoint as random_sdar

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
# Of a weight: it, its input and the product are rounded to bfloat16.
BUDGET = 3 * 2.0**-8
# Of float8 (e4m3).
SMALLEST_NORMAL, LARGEST = 2.0**-6, 448


def cases(quick: tuple[tuple[str, str], ...], names: Any) -> list[Any]:
    return [
        pytest.param(family, case, marks=() if (family, case) in quick else pytest.mark.long)
        for family in ("gemma", "llada2")
        for case in names
    ]


def check_linear_layers(running: Engine, path: Path, exact: dict[str, torch.Tensor]) -> None:
    """Each layer's product with rows of one number is the file's matrix, as float64 has it.

    The number is one that static scales of inputs keep as it is: the largest of their range.
    """
    scales = {
        name.replace("decoder.", "").replace("encoder.", "model."): float(parts["input_scale"])
        for name, parts in layers_in(path).items()
        if "input_scale" in parts
    }
    steps = 448 if "fp8" in path.name else 6 * 448
    seen = 0
    for name, layer, matrix in linear_layers(running, exact):
        prefix, _, last = name.rpartition(".")
        part = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}.get(last, last)
        number = scales.get(f"{prefix}.{part}", 1 / steps) * steps
        rows = number * torch.eye(matrix.shape[1])
        product, _ = layer(rows.bfloat16())
        bias = 0 if layer.bias is None else layer.bias.double()
        error = (product.double() - bias).T / number - matrix
        # A bias is added before the product is rounded.
        limit = BUDGET * (matrix.abs() + 1e-9)
        if layer.bias is not None:
            limit = limit + 2.0**-8 * layer.bias.double().abs()[:, None] / number
        if "fp8" in path.name and torch.cpu._is_amx_tile_supported():
            # With AMX vLLM's kernel reads subnormal numbers, zero among them, as normal ones.
            limit = limit + 2 * SMALLEST_NORMAL / LARGEST * matrix.abs().max()
        assert (error.abs() <= limit).all(), (name, float(error.abs().max()))
        seen += 1
    assert seen > 0


@pytest.mark.parametrize(
    ("family", "case"),
    cases(
        (
            ("gemma", "modelopt-fp8"),
            ("gemma", "modelopt-nvfp4"),
            ("gemma", "awq"),
            ("gemma", "gptq"),
        ),
        CASES,
    ),
)
def test_every_layer_is_what_the_file_says(family: str, case: str, tmp_path: Path) -> None:
    """And answers stay right: all of these problems are solved without quantization."""
    path, examples = packaged(tmp_path, family, case), encoded(family)[:14]
    found = matrices(path, torch.bfloat16).items()
    exact = {name.replace("decoder.", ""): matrix for name, matrix in found}
    with engine(path, BLOCK, **HALF) as running:
        assert solved(running, examples) >= 0.8 * len(examples)
        check_linear_layers(running, path, exact)
        assert check_experts(running, exact) == len(experts_of(running))


@pytest.mark.parametrize(
    ("family", "case"), cases((("gemma", "w8a16"),), ("w8a16", "w4a16", "w4a16-asymmetric"))
)
def test_weights_alone_give_the_tokens_of_their_numbers(
    family: str, case: str, tmp_path: Path
) -> None:
    """In float32 the same numbers, unquantized, give the same tokens."""
    path = packaged(tmp_path, family, case)
    plain = dequantized(path, family, tmp_path / path.name.replace(case, "plain"))
    options = {**TEXT_ONLY_OPTIONS, "dtype": "float32"}
    prompts = [example.prompt for example in encoded(family)]
    answers = []
    for served in (path, plain):
        with engine(served, BLOCK, **options) as running:
            params = [greedy(64, ignore_eos=True) for _ in prompts]
            answers.append([tokens for tokens, _ in running.generate(prompts, params)])
    assert answers[0] == answers[1]


@pytest.mark.long
def test_two_schemes_of_modelopt(tmp_path: Path) -> None:
    """FP8 everywhere, and experts in NVFP4."""
    path, other = (packaged(tmp_path, "gemma", f"modelopt-{name}") for name in ("fp8", "nvfp4"))
    exact = {
        name.replace("decoder.", ""): matrix
        for folder, experts in ((path, False), (other, True))
        for name, matrix in matrices(folder).items()
        if (".experts." in name) is experts
    }
    files = [load_file(folder / "model.safetensors") for folder in (path, other)]
    tensors = {name: tensor for name, tensor in files[0].items() if ".experts." not in name}
    tensors |= {name: tensor for name, tensor in files[1].items() if ".experts." in name}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "MIXED_PRECISION"
    config["quantization_config"]["quantized_layers"] = {
        name: {"quant_algo": "NVFP4", "group_size": 16}
        if ".experts." in name
        else {"quant_algo": "FP8"}
        for name in layers_in(path)
    }
    (path / "config.json").write_text(json.dumps(config))
    examples = encoded("gemma")[:14]
    with engine(path, BLOCK, **HALF) as running:
        assert solved(running, examples) >= 0.8 * len(examples)
        assert all(dtype != torch.uint8 for dtype in weight_dtypes(running))
        assert check_experts(running, exact) == len(experts_of(running))


def weight_dtypes(running: Engine) -> list[torch.dtype]:
    """Of the linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    layers = (m for m in running.runner.model.modules() if isinstance(m, LinearBase))
    return [layer.weight.dtype for layer in layers]


INTEGERS = ("gptq", "awq", "w8a16", "w4a16-asymmetric")
FLOATING = ("modelopt-fp8", "modelopt-nvfp4")
# Family to its checkpoint; vLLM has no kernel for a CPU for GPTQ's and AWQ's experts of width 64.
OTHERS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "sdar": (lambda path: TINY_SDAR, (*FLOATING, *INTEGERS)),
    "sdar-moe": (partial(random_sdar, experts=True, block=4), (*FLOATING, "w8a16")),
    "nemotron": (partial(random_nemotron, block=4), (*FLOATING, *INTEGERS)),
    "fast-dllm": (partial(random_fast_dllm, block=4), (*FLOATING, *INTEGERS)),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "case"), [(name, case) for name, (_, cases) in OTHERS.items() for case in cases]
)
def test_other_families(family: str, case: str, tmp_path: Path) -> None:
    """Their layers are what the files say, too, and requests end."""
    source = OTHERS[family][0](tmp_path / "source")
    path = packaged(tmp_path, family, case, source)
    names = {"encoder.": "model."} if family == "nemotron" else {}
    exact = {
        next((new + name.removeprefix(old) for old, new in names.items()), name): matrix
        for name, matrix in matrices(path, torch.bfloat16).items()
    }
    block = 8 if family == "fast-dllm" else 4
    with engine(path, block, dtype="bfloat16", diffusion_config=None) as running:
        check_linear_layers(running, path, exact)
        assert check_experts(running, exact) == len(experts_of(running))
        prompts = [[(7 * i + n) % 250 for i in range(20)] for n in range(4)]
        got = running.generate(prompts, [greedy(24, ignore_eos=True)] * 4)
        assert all(len(tokens) == 24 for tokens, _ in got)


@pytest.mark.long
@pytest.mark.parametrize("case", list(CASES))
def test_a_missing_scale_is_named(case: str, tmp_path: Path) -> None:
    path = packaged(tmp_path, "gemma", case)
    tensors = load_file(path / "model.safetensors")
    part = next(name for name in tensors if re.search(r"experts\.3\.up_proj\.\w*scale", name))
    del tensors[part]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    named = re.escape(part.replace("decoder.", ""))
    with pytest.raises((ValueError, RuntimeError), match=named), engine(path, BLOCK, **HALF):
        pass
