"""What a masked model's class has beside its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_dllm.checkpoints.tiled_head import is_plain, tiled_head
from vllm_dllm.ops.statistics.head import Head

if TYPE_CHECKING:
    from vllm_dllm.worker.model_state import DiffusionModelState


class MaskedCanvasModel:
    """Comes before vLLM's class among the bases of a model class.

    The backbone stays vLLM's. What differs is who decides the attention mask (the model state)
    and that logits are never handed to vLLM's own sampler: `compute_logits` passes hidden states
    through, and the readout calls `head` on as many rows at a time as it likes.
    """

    # vLLM's class has these.
    lm_head: Any
    logits_processor: Any
    config: Any

    @staticmethod
    def get_model_state_cls() -> type[DiffusionModelState]:
        """The hook through which vLLM's runner takes our request state and sampler."""
        from vllm_dllm.worker.model_state import DiffusionModelState

        return DiffusionModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states, unchanged: the readout owns the head."""
        return hidden_states

    @property
    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Hidden states ``[rows, hidden]`` to logits ``[rows, vocabulary]``; rows >= 1.

        Zero rows must not reach the head: vLLM's gather across tensor-parallel CPU
        workers dies on them (SIGFPE).
        """
        return partial(self.logits_processor, self.lm_head)

    @property
    def has_head(self) -> bool:
        """Whether the head is here, and not in a later pipeline stage."""
        return not isinstance(self.lm_head, PPMissingLayer)

    @property
    def has_plain_head(self) -> bool:
        """Whether it is here, and a matrix that `tiled_head` can take."""
        return self.has_head and is_plain(self.lm_head)

    def tiled_head(self) -> Head:
        """The same head for what computes no logits; see `checkpoints.tiled_head`."""
        return tiled_head(self.lm_head, self.config.vocab_size)
