"""Quantized copies of the tiny checkpoints, made where they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from examples.quantize.files import calibrated_inputs, quantize_checkpoint, scheme_named

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = EXAMPLES / "tiny" / "checkpoints"
# Made by examples/quantize from the tiny checkpoints; their calibration is what takes time.
CALIBRATED = EXAMPLES / "quantize" / "checkpoints"
FAMILIES = {"llada2": "tiny-llada2", "gemma": "tiny-diffusiongemma", "sdar": "tiny-sdar"}
GROUP = 32  # of INT4; the tiny experts' rows are 64 long
# A layer each; the others stay as they are. Layer 2 belongs to the second by the alphabet, and to
# the first by the order in the file.
MIXED = {
    "fp8-dynamic": r"re:.*layers\.[12]\..*",
    "int8": r"re:.*layers\.2\..*",
    "w4a16": r"re:.*layers\.3\..*",
    "nvfp4": r"re:.*layers\.4\..*",
}


def input_scales(family: str) -> dict[str, Mapping[str, torch.Tensor]]:
    """Module to the scale of its inputs that the calibration found."""
    return calibrated_inputs(CALIBRATED / f"{FAMILIES[family]}-nvfp4")


def quantized(folder: Path, family: str, schemes: Mapping[str, str]) -> Path:
    """A checkpoint with each scheme on the modules that its pattern (or `Linear`) names."""
    out = folder / "-".join([FAMILIES[family], *schemes])
    quantize_checkpoint(
        TINY / FAMILIES[family],
        out,
        [
            scheme_named(name, GROUP if name == "w4a16" else None, target)
            for name, target in schemes.items()
        ],
        input_scales(family) if "nvfp4" in schemes else None,
    )
    return out
