"""How tools name and lay out the same quantized numbers, and how they state their scheme.

compressed-tensors quantizes; here its tensors become those of ModelOpt, GPTQ or AWQ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

Tensors = Mapping[str, torch.Tensor]
Schemes = Sequence[QuantizationScheme]
PRODUCER = {"name": "modelopt", "version": "0.37.0"}


@dataclass(frozen=True)
class Packaging:
    """One tool's.

    Attributes:
        tensors: what a layer holds, from what compressed-tensors would store for the scheme.
        configuration: the `quantization_config` of `config.json`, from the schemes, from
            compressed-tensors' list of what is left out, and from the names of these matrices. With
            a key `quantization` it is the content of `hf_quant_config.json` instead.
    """

    tensors: Callable[[Tensors, QuantizationScheme], Tensors]
    configuration: Callable[[Schemes, Sequence[str], Sequence[str]], dict[str, Any]]


def unchanged(parts: Tensors, scheme: QuantizationScheme) -> Tensors:
    """As compressed-tensors stores them."""
    return parts


def compressed_tensors(
    schemes: Schemes, ignore: Sequence[str], left: Sequence[str]
) -> dict[str, Any]:
    """Groups of layers, each with a scheme."""
    stated = QuantizationConfig(
        config_groups={f"group_{n}": scheme for n, scheme in enumerate(schemes)},
        format=schemes[0].format if len(schemes) == 1 else "mixed-precision",
        ignore=list(ignore),
        quantization_status="compressed",
    )
    found: dict[str, Any] = json.loads(stated.model_dump_json(exclude_none=True))
    return found


def of_modelopt(parts: Tensors, scheme: QuantizationScheme) -> Tensors:
    """FP8 by tensor and NVFP4: scales of whole tensors are numbers to multiply by."""
    if "weight_packed" not in parts:
        scales = {name: parts[name].float().reshape(()) for name in ("weight_scale", "input_scale")}
        return {"weight": parts["weight"], **scales}
    return {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": (1 / parts["weight_global_scale"]).reshape(()),
        "input_scale": (1 / parts["input_global_scale"]).reshape(()),
    }


def modelopt(schemes: Schemes, ignore: Sequence[str], left: Sequence[str]) -> dict[str, Any]:
    """In `config.json`."""
    (scheme,) = schemes
    args = {"dynamic": False, "num_bits": scheme.weights.num_bits, "type": "float"}
    if scheme.weights.group_size:
        args["group_size"] = scheme.weights.group_size
    group = {"input_activations": args, "weights": args, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": wildcards(left),
        "quant_algo": "NVFP4" if scheme.weights.group_size else "FP8",
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def modelopt_in_own_file(
    schemes: Schemes, ignore: Sequence[str], left: Sequence[str]
) -> dict[str, Any]:
    """In a file of its own, as older versions state it."""
    stated = modelopt(schemes, ignore, left)
    found = {
        "quant_algo": stated["quant_algo"],
        "kv_cache_quant_algo": None,
        "exclude_modules": stated["ignore"],
    }
    if size := schemes[0].weights.group_size:
        found["group_size"] = size
    return {"producer": PRODUCER, "quantization": found}


def wildcards(left: Sequence[str]) -> list[str]:
    """Names of matrices; a tower or a module of which nothing is quantized has one pattern."""
    towers = ("self_conditioning", "vision_tower", "embed_vision")
    found = []
    for name in left:
        tower = next((tower for tower in towers if f".{tower}." in name), None)
        found.append(f"{name.partition(f'.{tower}.')[0]}.{tower}*" if tower else name)
    return list(dict.fromkeys(["lm_head", *found]))


def of_gptq(parts: Tensors, scheme: QuantizationScheme) -> Tensors:
    """Symmetric integers ``[in, out]``, packed along the inputs; zero points are stored less 1."""
    bits = scheme.weights.num_bits
    _, size = parts["weight_shape"].tolist()
    scales = parts["weight_scale"].t().half()
    zero = torch.full((scales.shape[1], len(scales)), -1, dtype=torch.int8)
    return {
        "qweight": parts["weight_packed"].t(),
        "qzeros": pack_to_int32(zero, bits, packed_dim=0).t(),
        "scales": scales,
        "g_idx": (torch.arange(size) * len(scales) // size).int(),
    }


def gptq(schemes: Schemes, ignore: Sequence[str], left: Sequence[str]) -> dict[str, Any]:
    """What is quantized is seen in the file."""
    (scheme,) = schemes
    return {
        "quant_method": "gptq",
        "bits": scheme.weights.num_bits,
        "group_size": scheme.weights.group_size or -1,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    }


def of_awq(parts: Tensors, scheme: QuantizationScheme) -> Tensors:
    """Integers ``[in, out]``, packed along the outputs: 0, 2, 4, 6, 1, 3, 5, 7 in a word."""
    out, size = parts["weight_shape"].tolist()
    scales, order = parts["weight_scale"], [0, 2, 4, 6, 1, 3, 5, 7]
    weight = unpack_from_int32(parts["weight_packed"], 4, torch.Size([out, size]))
    zero = unpack_from_int32(parts["weight_zero_point"], 4, scales.shape, packed_dim=0)

    def packed(values: torch.Tensor) -> torch.Tensor:
        words = values.t().unflatten(1, (-1, 8))[..., order].flatten(1)
        return pack_to_int32(words.contiguous(), 4)

    return {"qweight": packed(weight), "qzeros": packed(zero), "scales": scales.t().half()}


def awq(schemes: Schemes, ignore: Sequence[str], left: Sequence[str]) -> dict[str, Any]:
    """What is quantized is seen in the file."""
    (scheme,) = schemes
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": scheme.weights.num_bits,
        "group_size": scheme.weights.group_size,
        "zero_point": True,
    }


PACKAGINGS = {
    "compressed-tensors": Packaging(unchanged, compressed_tensors),
    "modelopt": Packaging(of_modelopt, modelopt),
    "modelopt-in-own-file": Packaging(of_modelopt, modelopt_in_own_file),
    "gptq": Packaging(of_gptq, gptq),
    "awq": Packaging(of_awq, awq),
}
