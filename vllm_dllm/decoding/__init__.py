"""Decoding algorithms: pure rules from a canvas and row statistics to the next canvas."""

from vllm_dllm.decoding.base import (
    Algorithm,
    Canvas,
    Corruption,
    StateTensor,
    StepContext,
    Update,
    confidence,
    reveal,
)
from vllm_dllm.decoding.completion import decided_prefix, emitted_length, first_end
from vllm_dllm.decoding.registry import (
    MODELS,
    algorithm_names,
    algorithms,
    get_algorithm,
    other_kind,
    register_algorithm,
    registered_names,
)

__all__ = [
    "MODELS",
    "Algorithm",
    "Canvas",
    "Corruption",
    "StateTensor",
    "StepContext",
    "Update",
    "algorithm_names",
    "algorithms",
    "confidence",
    "decided_prefix",
    "emitted_length",
    "first_end",
    "get_algorithm",
    "other_kind",
    "register_algorithm",
    "registered_names",
    "reveal",
]
