"""LLaDA2 on vLLM's BailingMoeV2 backbone.

The backbone is the same network; what differs is who decides the attention mask (the
model state, see `vllm_dllm.engine.attention`) and that logits are never handed to vLLM's
own sampler: `compute_logits` passes hidden states through and the diffusion sampler
calls `head` on as many rows at a time as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoE, BailingMoeV2ForCausalLM

from vllm_dllm.models.llada2_config import LLaDA2MoeConfig

if TYPE_CHECKING:
    from vllm_dllm.engine.model_state import DiffusionModelState


TENSORS = ("model.word_embeddings.", "model.layers.", "model.norm.", "lm_head.")


class LLaDA2Moe(BailingMoE):
    """The backbone's experts, routed by float32 scores as in the authors' code.

    vLLM rounds the router's float32 logits to the model's dtype before it chooses experts; in
    bfloat16 that chooses other experts wherever two scores are close.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[tokens, hidden]`` to the same shape."""
        router_logits, _ = self.gate(hidden_states)  # [tokens, experts], float32
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


class LLaDA2MoeModelLM(BailingMoeV2ForCausalLM):
    """LLaDA2.x mixture-of-experts models (2.0 and 2.1, mini and flash).

    Raises:
        ValueError: an activation other than SiLU, or a checkpoint whose tensors are not
            those of this architecture.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        _check_config(config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if type(module) is BailingMoE:
                # The backbone names its expert class itself; same parameters, other forward.
                module.__class__ = LLaDA2Moe

    @staticmethod
    def get_model_state_cls() -> type[DiffusionModelState]:
        """The hook through which vLLM's runner takes our request state and sampler."""
        from vllm_dllm.engine.model_state import DiffusionModelState

        return DiffusionModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states, unchanged: the sampler owns the head."""
        return hidden_states

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` of hidden states ``[rows, hidden]``; rows >= 1.

        Zero rows must not reach the head: vLLM's gather across tensor-parallel CPU
        workers dies on them (SIGFPE).
        """
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a LLaDA2 checkpoint; name the first tensor that does not belong."""
        return super().load_weights(self._checked(weights))

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        experts = self.config.num_experts
        for name, tensor in weights:
            if not name.startswith(TENSORS):
                raise ValueError(
                    f"not a LLaDA2 checkpoint: unexpected tensor {name!r}; expected "
                    f"{', '.join(TENSORS)}"
                )
            if (
                name.endswith((".mlp.gate.weight", ".mlp.gate.expert_bias"))
                and tensor.shape[0] != experts
            ):
                raise ValueError(
                    f"{name} routes to {tensor.shape[0]} experts, config.json says "
                    f"num_experts={experts}"
                )
            yield name, tensor


def _check_config(config: object) -> None:
    if not isinstance(config, LLaDA2MoeConfig):
        raise ValueError(
            "LLaDA2MoeModelLM needs a checkpoint with model_type 'llada2_moe', "
            f"got {getattr(config, 'model_type', type(config).__name__)!r}"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"LLaDA2 supports hidden_act 'silu' only, got {config.hidden_act!r}")
