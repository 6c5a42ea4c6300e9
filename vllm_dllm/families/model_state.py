"""The model state of a served model: the engine's, with what differs between families passed in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_dllm.engine.model_state import DiffusionModelState
from vllm_dllm.families.registry import family_of
from vllm_dllm.families.served import canvas_kind, commit_policy


class FamilyModelState(DiffusionModelState):
    """See `DiffusionModelState`; vLLM's runner creates it."""

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device
    ) -> None:
        family, served = family_of(vllm_config), vllm_config.model_config.dllm
        kind = canvas_kind(vllm_config, family, served)
        policy = commit_policy(vllm_config, family, served)
        super().__init__(vllm_config, model, encoder_cache, device, family, kind, policy)
        self.family = family
