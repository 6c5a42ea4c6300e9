"""Decoding algorithms: pure rules from a canvas and row statistics to the next canvas."""

from vllm_dllm.decoding.base import (
    Algorithm,
    BaseAlgorithm,
    Canvas,
    Corruption,
    MaskedAlgorithm,
    StateTensor,
    StepContext,
    Update,
    confidence,
    reveal,
)
from vllm_dllm.decoding.completion import emitted_length
from vllm_dllm.decoding.credit import Credit
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.decoding.entropy_bounded import EntropyBounded
from vllm_dllm.decoding.fixed_steps import FixedSteps
from vllm_dllm.decoding.hierarchical import Hierarchical
from vllm_dllm.decoding.joint_threshold import JointThreshold
from vllm_dllm.decoding.low_confidence import LowConfidence
from vllm_dllm.decoding.low_confidence_dynamic import LowConfidenceDynamic
from vllm_dllm.decoding.low_confidence_static import LowConfidenceStatic
from vllm_dllm.decoding.masked_entropy_bound import MaskedEntropyBound
from vllm_dllm.decoding.registry import (
    MODELS,
    algorithm_names,
    algorithms,
    get_algorithm,
    other_kind,
    register_algorithm,
)
from vllm_dllm.decoding.sequential import Sequential

__all__ = [
    "MODELS",
    "Algorithm",
    "BaseAlgorithm",
    "Canvas",
    "Corruption",
    "Credit",
    "EntropyBound",
    "EntropyBounded",
    "FixedSteps",
    "Hierarchical",
    "JointThreshold",
    "LowConfidence",
    "LowConfidenceDynamic",
    "LowConfidenceStatic",
    "MaskedAlgorithm",
    "MaskedEntropyBound",
    "Sequential",
    "StateTensor",
    "StepContext",
    "Update",
    "algorithm_names",
    "algorithms",
    "confidence",
    "emitted_length",
    "get_algorithm",
    "other_kind",
    "register_algorithm",
    "reveal",
]
