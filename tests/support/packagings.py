"""Tiny checkpoints in every packaging, and what their tensors mean, computed in float64."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.quantize.files import quantize_checkpoint, scheme_named
from tests.support.quantized import FAMILIES, GROUP, TINY, input_scales

# Name of a case: a scheme and a packaging of `examples.quantize`.
CASES = {
    "modelopt-fp8": ("fp8", "modelopt"),
    "modelopt-nvfp4": ("nvfp4", "modelopt"),
    "modelopt-nvfp4-own-file": ("nvfp4", "modelopt-in-own-file"),
    "gptq": ("w4a16", "gptq"),
    "awq": ("w4a16-asymmetric", "awq"),
    "w8a16": ("w8a16", "compressed-tensors"),
    "w4a16": ("w4a16", "compressed-tensors"),
    "w4a16-asymmetric": ("w4a16-asymmetric", "compressed-tensors"),
    "w4a16-rows": ("w4a16", "compressed-tensors"),
    "gptq-rows": ("w4a16", "gptq"),
}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def packaged(folder: Path, family: str, case: str, source: Path | None = None) -> Path:
    """A family's tiny checkpoint in a packaging, or a `source` that was never calibrated."""
    scheme, packaging = CASES[case]
    known = None
    if packaging.startswith("modelopt"):
        known = input_scales(family) if source is None else some_scales(source)
    out = folder / f"{family}-{case}"
    size = -1 if case.endswith("rows") else GROUP
    schemes = [scheme_named(scheme, size if "a16" in scheme else None)]
    quantize_checkpoint(source or TINY / FAMILIES[family], out, schemes, known, packaging)
    return out


def some_scales(source: Path) -> dict[str, Mapping[str, torch.Tensor]]:
    """One scale for the inputs of all layers: the largest is 27."""
    names = load_file(source / "model.safetensors")
    return {
        name.removesuffix(".weight"): {"input_global_scale": torch.tensor([100.0])}
        for name in names
    }


def layers_in(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each quantized layer, by its name in the checkpoint."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        layers.setdefault(module, {})[part] = tensor
    return {
        name: parts for name, parts in layers.items() if parts.keys() & {"weight_scale", "scales"}
    }


def matrices(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Module to its matrix ``[out, in]`` in float64, from a checkpoint of any packaging.

    `dtype` is the model's, in which vLLM's layers hold the scales of integers.
    """
    return {name: matrix_of(parts, dtype) for name, parts in layers_in(path).items()}


def matrix_of(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What the tensors of a layer mean."""
    if "weight_scale_2" in parts:  # ModelOpt's NVFP4
        halves = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], -1).flatten(1).long()
        values = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)[halves]
        scale = parts["weight_scale"].double() * parts["weight_scale_2"].double()
        return by_group(values, scale)
    if "qzeros" in parts and "g_idx" in parts:  # GPTQ
        values = nibbles(parts["qweight"].t()) - 8
        return by_group(values.double(), parts["scales"].t().to(dtype).double())
    if "qzeros" in parts:  # AWQ
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        value, zero = (
            nibbles(parts[name]).unflatten(1, (-1, 8))[..., order].flatten(1).t()
            for name in ("qweight", "qzeros")
        )
        scale = parts["scales"].t().to(dtype).double()
        return by_group((value - zero.repeat_interleave(GROUP, 1)).double(), scale)
    if "weight_packed" in parts:  # compressed-tensors' integers
        bits = 32 * parts["weight_packed"].shape[1] // int(parts["weight_shape"][1])
        values, zero = nibbles(parts["weight_packed"], bits), 1 << (bits - 1)
        if "weight_zero_point" in parts:
            zero = nibbles(parts["weight_zero_point"].t()).t().repeat_interleave(GROUP, 1)
        return by_group((values - zero).double(), parts["weight_scale"].to(dtype).double())
    return parts["weight"].double() * parts["weight_scale"].double()


def nibbles(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """The unsigned numbers in 32-bit words, lowest bits first; int64."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def by_group(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values ``[out, in]`` times scales ``[out, groups]``."""
    return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)


def dequantized(path: Path, family: str, out: Path) -> Path:
    """The same numbers as an unquantized checkpoint in float32."""
    source = TINY / FAMILIES[family]
    shutil.copytree(source, out)
    found = {name: matrix.float() for name, matrix in matrices(path).items()}
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        tensors[name] = tensors[name].float()
        module = name.removesuffix(".weight")
        if module in found:
            tensors[name] = found[module]
        elif match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name):
            parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
            tensors[name] = torch.stack(
                [
                    torch.cat([found[f"{match[1]}.{expert}.{part}_proj"] for part in parts])
                    for expert in range(len(tensors[name]))
                ]
            )
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return out
