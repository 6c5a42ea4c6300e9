"""Decoding algorithms: pure rules from a canvas and row statistics to the next canvas."""

from vllm_dllm.decoding.base import (
    Algorithm,
    Canvas,
    Corruption,
    EditTokens,
    StateTensor,
    StepContext,
    Update,
    confidence,
    reveal,
)
from vllm_dllm.decoding.registry import get_algorithm, register_algorithm

__all__ = [
    "Algorithm",
    "Canvas",
    "Corruption",
    "EditTokens",
    "StateTensor",
    "StepContext",
    "Update",
    "confidence",
    "get_algorithm",
    "register_algorithm",
    "reveal",
]
