"""The model state of a served model: the engine's, with what differs between families passed in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_dllm.engine.contracts import CommitPolicy
from vllm_dllm.engine.model_state import DiffusionModelState
from vllm_dllm.engine.slots import CanvasKind
from vllm_dllm.families.registry import family_of
from vllm_dllm.settings.server import GRANTED, SEPARATE


class FamilyModelState(DiffusionModelState):
    """See `DiffusionModelState`; vLLM's runner creates it."""

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device
    ) -> None:
        family, served = family_of(vllm_config), vllm_config.model_config.dllm
        vocabulary = vllm_config.model_config.get_vocab_size()
        kind = CanvasKind(
            served.length * served.settings.blocks,
            vocabulary,
            served.mask_token,
            family.aligned,
            served.edit_tokens,
            family.shifted,
            served.settings.blocks,
            served.settings.blocks_open_at,
            family.draw_confidence,
        )
        policy = CommitPolicy(
            sync=served.settings.execution == "sync",
            early=served.settings.eos_early_stop is not False,
            skip_last_commit=served.settings.skip_last_commit,
            in_place=family.aligned,
            fused=served.commits != SEPARATE,
            granted=served.commits == GRANTED,
        )
        super().__init__(vllm_config, model, encoder_cache, device, family, kind, policy)
        self.family = family

    def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
        """See vLLM's class, which lowers the mode of CUDA graphs accordingly."""
        return self.attention.graph_support, type(self.attention).__name__
