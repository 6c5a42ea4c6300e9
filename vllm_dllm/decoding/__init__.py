"""Decoding algorithms: pure rules from a canvas and row statistics to the next canvas."""

from vllm_dllm.decoding.base import (
    Algorithm,
    Canvas,
    StateTensor,
    StepContext,
    Update,
    algorithm_names,
    get_algorithm,
)
from vllm_dllm.decoding.completion import emitted_length
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.decoding.low_confidence import LowConfidence

__all__ = [
    "Algorithm",
    "Canvas",
    "EntropyBound",
    "LowConfidence",
    "StateTensor",
    "StepContext",
    "Update",
    "algorithm_names",
    "emitted_length",
    "get_algorithm",
]
