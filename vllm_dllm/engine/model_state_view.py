"""What the modules that take further passes, and compile, see of our ``ModelState``."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from vllm_dllm.engine.contracts import CommitPolicy, Readout
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.settings.resolution import Served


class ModelStateView(Protocol):
    """The members that these modules read, or call.

    `prepared` is the `further_passes.PreparedStep` of the present step, and `graphs` the runner's
    manager of CUDA graphs.
    """

    slots: SlotState
    served: Served
    policy: CommitPolicy
    readout: Readout
    sampler: Any  # a `DiffusionSampler`, or None before there is one
    parts: Any  # `OptionalParts`
    prepared: Any
    graphs: Any
    model: Any
    model_config: Any
    vllm_config: Any
    dtype: torch.dtype
    max_num_reqs: int
    max_num_tokens: int

    def prepare_attn(self, *arguments: Any) -> Any:
        """See vLLM."""

    def prepare_inputs(self, *arguments: Any) -> Any:
        """See vLLM."""
