"""Write a quantized checkpoint from an unquantized one, file by file, with compressed-tensors.

    python -m examples.quantize.files SOURCE OUT --scheme int8

Every matrix of a transformer layer is quantized; what `Family.ignore` names is left alone, as are
embeddings, norms and the head. No model is built: weights need nothing but themselves, rounded to
nearest. The scales of activations that NVFP4 wants come from a calibration; the scripts beside
this file run one with LLM Compressor and hand them over. Where several matrices become one in
vLLM (queries, keys and values; gates and ups), they get one global scale.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from tqdm import tqdm

from examples.quantize.storage import Source, Writer

# Our name of a scheme: the library's name, and the layout of its tensors.
SCHEMES = {
    "fp8-dynamic": ("FP8_DYNAMIC", "float-quantized"),
    "int8": ("INT8", "int-quantized"),
    "w4a16": ("W4A16", "pack-quantized"),
    "nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
}
# Matrices that vLLM makes one: the last part of a name to a word they share.
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "both", "up_proj": "both"}


@dataclass(frozen=True)
class Family:
    """What is left alone in a family's checkpoints; patterns match a module's whole name."""

    model_type: str
    ignore: tuple[str, ...]


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llada2_moe", ("lm_head", r"re:.*\.mlp\.gate$")),
        Family("sdar", ("lm_head",)),
        Family("nemotron_labs_diffusion", ("diffusion_head",)),
        Family("Fast_dLLM_Qwen", ("lm_head",)),
        Family("sdar_moe", ("lm_head", r"re:.*\.mlp\.gate$")),
        Family(
            "diffusion_gemma",
            (
                *("lm_head", r"re:.*router\.proj$", "re:.*self_conditioning.*"),
                *("re:.*vision_tower.*", "re:.*embed_vision.*"),
            ),
        ),
    )
}


def family_of(source: Path) -> Family:
    """The family of a checkpoint.

    Raises:
        SystemExit: it is not one of our models.
    """
    kind = json.loads((source / "config.json").read_text())["model_type"]
    if kind not in FAMILIES:
        raise SystemExit(f"model_type {kind!r} is none of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def scheme_named(
    name: str, group_size: int | None = None, target: str = "Linear"
) -> QuantizationScheme:
    """A scheme for all linear layers, or for those that a pattern names.

    Args:
        name: a key of `SCHEMES`.
        group_size: of `w4a16` only; it must divide the rows of every matrix. None: 128.
        target: `Linear`, or `re:` and a regular expression for names of modules.
    """
    preset, layout = SCHEMES[name]
    scheme = preset_name_to_scheme(preset, [target])
    scheme.format = layout
    if group_size is not None:
        scheme.weights.group_size = group_size
    return scheme


def scheme_for(
    name: str, tensor: torch.Tensor, family: Family, schemes: Sequence[QuantizationScheme]
) -> QuantizationScheme | None:
    """The scheme that holds for a tensor; None for what is not a matrix or is left alone.

    Patterns go before `Linear`, and are tried in alphabetical order, as compressed-tensors does.
    """
    if tensor.ndim != 2 or ".layers." not in name or not name.endswith(".weight"):
        return None
    module = name.removesuffix(".weight")
    if any(matches(entry, module) for entry in family.ignore):
        return None
    by_target = {target: scheme for scheme in schemes for target in scheme.targets}
    for target in sorted(by_target, key=lambda one: (one == "Linear", one.startswith("re:"), one)):
        if target == "Linear" or matches(target, module):
            return by_target[target]
    return None


def matches(entry: str, module: str) -> bool:
    """Whether a module is meant; `re:` begins a regular expression."""
    return bool(re.match(entry[3:], module)) if entry.startswith("re:") else entry == module


def group_of(module: str) -> str:
    """The name that modules share which vLLM makes one."""
    prefix, _, last = module.rpartition(".")
    return f"{prefix}.{FUSED.get(last, last)}"


def weight_scales(
    weight: torch.Tensor, scheme: QuantizationScheme, global_scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Scales that cover the largest magnitude of each channel, group or tensor."""
    args = scheme.weights
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy in ("group", "tensor_group"):
        if weight.shape[1] % args.group_size:
            raise SystemExit(
                f"rows of {weight.shape[1]} cannot be split into groups of {args.group_size}; "
                "give --group-size"
            )
        parts = weight.unflatten(1, (-1, args.group_size))
        low, high = parts.amin(-1), parts.amax(-1)
    elif strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin(), weight.amax()
    scale, _ = calculate_qparams(low.float(), high.float(), args, global_scale)
    found = {"weight_scale": scale}
    if global_scale is not None:
        found["weight_global_scale"] = global_scale.clone()  # matrices share it, files do not
    return found


def global_scales(
    source: Source, schemes: Sequence[QuantizationScheme], family: Family
) -> dict[str, torch.Tensor]:
    """For NVFP4: one global scale for each matrix, or for those that become one."""
    if not any(scheme.format == SCHEMES["nvfp4"][1] for scheme in schemes):
        return {}
    largest: dict[str, torch.Tensor] = {}
    for stored in tqdm(source.files, desc="ranges", unit="tensor"):
        for name, tensor in source.matrices(stored):
            scheme = scheme_for(name, tensor, family, schemes)
            if scheme is not None and scheme.format == SCHEMES["nvfp4"][1]:
                group = group_of(name.removesuffix(".weight"))
                here = tensor.abs().amax().float()
                largest[group] = torch.maximum(largest.get(group, here), here)
    return {group: generate_gparam(-high, high) for group, high in largest.items()}


def compressed(
    module: str,
    weight: torch.Tensor,
    scheme: QuantizationScheme,
    global_scale: torch.Tensor | None,
    known: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What a checkpoint holds for one matrix; `known` goes before what is computed here.

    Raises:
        SystemExit: the scheme wants a scale of the activations, and none is known.
    """
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    wanted = compressor.compression_param_names(scheme)
    if "input_global_scale" in wanted and "input_global_scale" not in known:
        raise SystemExit(
            f"{module} has no calibrated scale of its activations, which this scheme wants; use "
            "llada2.py or diffusion_gemma.py"
        )
    scales = weight_scales(weight, scheme, global_scale)
    # A calibration for one scheme finds numbers that others have no place for.
    scales |= {part: value for part, value in known.items() if part in wanted}
    return compressor.compress({"weight": weight.float(), **scales}, scheme)


def quantize_checkpoint(
    path: Path,
    out: Path,
    schemes: Sequence[QuantizationScheme],
    calibrated: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write the quantized checkpoint, its configuration, and a copy of all other files.

    Args:
        path: a folder with `config.json` and safetensors.
        out: a folder; made if it is missing.
        schemes: see `scheme_named` and `scheme_for`.
        calibrated: module to what LLM Compressor found for it (`weight_scale`,
            `weight_global_scale`, `input_global_scale`); what is missing is computed from the
            weights alone, rounding to nearest.
    """
    family, source = family_of(path), Source(path)
    globals_ = global_scales(source, schemes, family)
    writer = Writer(out)
    for stored in tqdm(source.files, desc="weights", unit="tensor"):
        found = list(source.matrices(stored))
        if not any(scheme_for(name, tensor, family, schemes) for name, tensor in found):
            found = [(stored, source[stored])]
        for name, tensor in found:
            scheme = scheme_for(name, tensor, family, schemes)
            if scheme is None:
                writer.add(name, tensor)
                continue
            module = name.removesuffix(".weight")
            known = (calibrated or {}).get(module, {})
            parts = compressed(module, tensor, scheme, globals_.get(group_of(module)), known)
            for part, value in parts.items():
                writer.add(f"{module}.{part}", value)
    writer.close()
    write_config(path, out, schemes, family)


def write_config(
    path: Path, out: Path, schemes: Sequence[QuantizationScheme], family: Family
) -> None:
    """`config.json` with its `quantization_config`; everything that is no weight is copied."""
    for file in path.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "training.json":
            shutil.copyfile(file, out / file.name)
    stated = QuantizationConfig(
        config_groups={f"group_{n}": scheme for n, scheme in enumerate(schemes)},
        format=schemes[0].format if len(schemes) == 1 else "mixed-precision",
        ignore=list(family.ignore),
        quantization_status="compressed",
    )
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    config["quantization_config"] = json.loads(stated.model_dump_json(exclude_none=True))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", choices=[name for name in SCHEMES if name != "nvfp4"])
    parser.add_argument("--group-size", type=int, help="of w4a16; 128 unless given")
    args = parser.parse_args()
    quantize_checkpoint(args.source, args.out, [scheme_named(args.scheme, args.group_size)])


if __name__ == "__main__":
    main()
