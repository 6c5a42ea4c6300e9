"""Devices and models that routes are chosen for, with the published sizes."""

from __future__ import annotations

from dataclasses import replace

from vllm_dllm.attention.routes import Device, LayerShape, ModelAttention


def cuda(major: int, minor: int, *flash_versions: int) -> Device:
    """A CUDA device with the versions of FlashAttention that vLLM's wheel has for it."""
    return Device("cuda", (major, minor), True, frozenset(flash_versions))


DEVICES = {
    "SM80": cuda(8, 0, 2),
    "SM86": cuda(8, 6, 2),
    "SM89": cuda(8, 9, 2),
    "SM90": cuda(9, 0, 2, 3, 4),
    "SM100": cuda(10, 0, 2, 4),
    "SM120": cuda(12, 0, 2),
    "ROCm": Device("rocm"),
    "CPU": Device("cpu", triton=False),
    "CPU with Triton": Device("cpu"),
}

LLADA2 = ModelAttention(True, 32, (LayerShape(128),))
GEMMA = ModelAttention(False, 256, (LayerShape(256, 1024), LayerShape(512)))
GEMMA_REFERENCE = replace(GEMMA, window="reference")
