"""Write a quantized checkpoint from an unquantized one, file by file, with compressed-tensors.

    python -m examples.quantize.files SOURCE OUT --scheme int8
    python -m examples.quantize.files SOURCE OUT --scheme w4a16 --packaging gptq
    python -m examples.quantize.files SOURCE OUT --scheme nvfp4 --packaging modelopt --ranges NVFP4

Every matrix of a transformer layer is quantized; what `Family.ignore` names is left alone, as are
embeddings, norms and the head. No model is built: weights need nothing but themselves, rounded to
nearest. The scales of activations that FP8 by tensor and NVFP4 want come from a calibration; the
scripts beside this file run one with LLM Compressor and hand them over, and --ranges takes them
from a checkpoint that one of these has written. Where several matrices become one in vLLM (queries,
keys and values; gates and ups), they get one global scale. `packagings.py` has the layouts.
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
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from tqdm import tqdm

from examples.quantize.packagings import PACKAGINGS
from examples.quantize.storage import Source, Writer

# Our name of a scheme: the library's name, and the layout of its tensors.
SCHEMES = {
    "fp8": ("FP8", "float-quantized"),
    "fp8-dynamic": ("FP8_DYNAMIC", "float-quantized"),
    "int8": ("INT8", "int-quantized"),
    "w4a16": ("W4A16", "pack-quantized"),
    "w4a16-asymmetric": ("W4A16_ASYM", "pack-quantized"),
    "w8a16": ("W8A16", "pack-quantized"),
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
        Family(
            "nemotron_labs_diffusion_vlm",
            ("diffusion_head", "re:.*vision_tower.*", "re:.*projector.*"),
        ),
        Family("sdar_v", ("language_model.lm_head", r"re:vision_tower\..*")),
        Family("Fast_dLLM_Qwen", ("lm_head",)),
        Family("Dream", ("lm_head",)),
        Family("PanguEmbedded", ("lm_head",)),
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
        group_size: of `w4a16` and `w8a16`; it must divide the rows of every matrix. None: 128; -1:
            one scale for a whole row.
        target: `Linear`, or `re:` and a regular expression for names of modules.
    """
    preset, layout = SCHEMES[name]
    scheme = preset_name_to_scheme(preset, [target])
    scheme.format = layout
    if group_size == -1:
        scheme.weights.strategy, scheme.weights.group_size = "channel", None
    elif group_size is not None:
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
    weight: torch.Tensor, scheme: QuantizationScheme, largest: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Scales that cover the largest magnitude of each channel, group or tensor.

    Args:
        weight: ``[out, in]``.
        scheme: how it is quantized.
        largest: the largest magnitude of the matrices that become one, see `largest_magnitudes`.
    """
    args, global_scale = scheme.weights, None
    strategy = strategy_of(scheme)
    if strategy == "tensor_group" and largest is not None:
        global_scale = generate_gparam(-largest, largest)
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
        assert largest is not None
        low, high = -largest, largest
    scale, zero = calculate_qparams(low.float(), high.float(), args, global_scale)
    found = {"weight_scale": scale.reshape(1) if strategy == "tensor" else scale}
    if not args.symmetric:
        found["weight_zero_point"] = zero
    if global_scale is not None:
        found["weight_global_scale"] = global_scale.clone()  # matrices share it, files do not
    return found


def strategy_of(scheme: QuantizationScheme) -> str:
    """What has a scale of its own: `tensor`, `channel`, `group` or `tensor_group`."""
    return str(getattr(scheme.weights.strategy, "value", scheme.weights.strategy))


def largest_magnitudes(
    source: Source, schemes: Sequence[QuantizationScheme], family: Family
) -> dict[str, torch.Tensor]:
    """For FP8 by tensor and NVFP4: of each matrix, or of those that become one."""
    if not any(has_one_scale(scheme) for scheme in schemes):
        return {}
    largest: dict[str, torch.Tensor] = {}
    for stored in tqdm(source.files, desc="ranges", unit="tensor"):
        for name, tensor in source.matrices(stored):
            scheme = scheme_for(name, tensor, family, schemes)
            if scheme is not None and has_one_scale(scheme):
                group = group_of(name.removesuffix(".weight"))
                here = tensor.abs().amax().float()
                largest[group] = torch.maximum(largest.get(group, here), here)
    return largest


def has_one_scale(scheme: QuantizationScheme) -> bool:
    """Whether a scale holds for whole matrices, and static scales for their inputs."""
    return strategy_of(scheme) in ("tensor", "tensor_group")


def compressed(
    module: str,
    weight: torch.Tensor,
    scheme: QuantizationScheme,
    largest: torch.Tensor | None,
    known: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What a checkpoint holds for one matrix; `known` goes before what is computed here.

    `largest` is as for `weight_scales`.

    Raises:
        SystemExit: the scheme wants a scale of the activations, and none is known.
    """
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    wanted = [*compressor.compression_param_names(scheme)]
    if strategy_of(scheme) == "tensor":
        wanted.append("input_scale")
        if "input_global_scale" in known:
            # The largest input times this is 6 * 448, the largest number of NVFP4; FP8's is 448.
            known = {**known, "input_scale": 6 / known["input_global_scale"]}
    if missing := [part for part in wanted if part.startswith("input_") and part not in known]:
        raise SystemExit(
            f"{module} has no calibrated {missing[0]}, which this scheme wants; use llada2.py or "
            "diffusion_gemma.py, or give --ranges"
        )
    scales = weight_scales(weight, scheme, largest)
    # A calibration for one scheme finds numbers that others have no place for.
    scales |= {part: value for part, value in known.items() if part in wanted}
    return compressor.compress({"weight": weight.float(), **scales}, scheme)


def quantize_checkpoint(
    path: Path,
    out: Path,
    schemes: Sequence[QuantizationScheme],
    calibrated: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    packaging: str = "compressed-tensors",
) -> None:
    """Write the quantized checkpoint, its configuration, and a copy of all other files.

    Args:
        path: a folder with `config.json` and safetensors.
        out: a folder; made if it is missing.
        schemes: see `scheme_named` and `scheme_for`.
        calibrated: module to what LLM Compressor found for it (`weight_scale`,
            `weight_global_scale`, `input_global_scale`); what is missing is computed from the
            weights alone, rounding to nearest.
        packaging: a key of `PACKAGINGS`; all but compressed-tensors have one scheme.
    """
    family, source = family_of(path), Source(path)
    largest = largest_magnitudes(source, schemes, family)
    writer, chosen, left = Writer(out), PACKAGINGS[packaging], []
    for stored in tqdm(source.files, desc="weights", unit="tensor"):
        found = list(source.matrices(stored))
        if not any(scheme_for(name, tensor, family, schemes) for name, tensor in found):
            found = [(stored, source[stored])]
        for name, tensor in found:
            scheme = scheme_for(name, tensor, family, schemes)
            module = name.removesuffix(".weight")
            if scheme is None:
                writer.add(name, tensor)
                if tensor.ndim == 2:
                    left.append(module)
                continue
            known = (calibrated or {}).get(module, {})
            parts = compressed(module, tensor, scheme, largest.get(group_of(module)), known)
            for part, value in chosen.tensors(parts, scheme).items():
                writer.add(f"{module}.{part}", value)
    writer.close()
    write_config(path, out, schemes, family, packaging, left)


def write_config(
    path: Path,
    out: Path,
    schemes: Sequence[QuantizationScheme],
    family: Family,
    packaging: str = "compressed-tensors",
    left: Sequence[str] = (),
) -> None:
    """State the schemes in `config.json` or beside it; everything that is no weight is copied."""
    for file in path.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "training.json":
            shutil.copyfile(file, out / file.name)
    stated = PACKAGINGS[packaging].configuration(schemes, family.ignore, left)
    if "quantization" in stated:
        (out / "hf_quant_config.json").write_text(json.dumps(stated, indent=2) + "\n")
        return
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    config["quantization_config"] = stated
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def calibrated_inputs(path: Path) -> dict[str, Mapping[str, torch.Tensor]]:
    """Module to the scale of its inputs in an NVFP4 checkpoint that was calibrated before."""
    part, source = ".input_global_scale", Source(path)
    return {
        name.removesuffix(part): {part[1:]: source[name]}
        for name in source.files
        if name.endswith(part)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", choices=list(SCHEMES), required=True)
    parser.add_argument(
        "--group-size", type=int, help="of w4a16 and w8a16; 128 unless given, -1: rows"
    )
    parser.add_argument("--packaging", choices=list(PACKAGINGS), default="compressed-tensors")
    parser.add_argument("--ranges", type=Path, help="an NVFP4 checkpoint, for fp8 and nvfp4")
    args = parser.parse_args()
    scheme = scheme_named(args.scheme, args.group_size)
    known = calibrated_inputs(args.ranges) if args.ranges else None
    quantize_checkpoint(args.source, args.out, [scheme], known, args.packaging)


if __name__ == "__main__":
    main()
