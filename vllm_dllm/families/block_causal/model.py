"""What a masked model's class has beside its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_dllm.checkpoints.tiled_head import is_plain, tiled_head
from vllm_dllm.checkpoints.updates import UpdatableWeights
from vllm_dllm.ops.statistics.head import Head

if TYPE_CHECKING:
    from vllm_dllm.families.model_state import FamilyModelState


class MaskedCanvasModel(UpdatableWeights):
    """Comes before vLLM's class among the bases of a model class.

    The backbone stays vLLM's. What differs is who decides the attention mask (the model state)
    and that logits are never handed to vLLM's own sampler: `compute_logits` passes hidden states
    through, and the readout calls `head` on as many rows at a time as it likes.

    The backbone's `compute_logits` computes logits from `lm_head` and `logits_processor`, as
    vLLM's models do. A class whose backbone does more to its logits there than `logits_processor`
    knows of overrides `has_plain_head` to return False.
    """

    # What an adapter may adapt beside the layers' projections. Not the head: vLLM looks up one
    # adapter for each request there, and a canvas has L rows.
    embedding_modules: ClassVar[dict[str, str]] = {"embed_tokens": "input_embeddings"}

    # vLLM's class has these.
    lm_head: Any
    logits_processor: Any

    @staticmethod
    def get_model_state_cls() -> type[FamilyModelState]:
        """The hook through which vLLM's runner takes our request state and sampler."""
        from vllm_dllm.families.model_state import FamilyModelState

        return FamilyModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states, unchanged: the readout owns the head."""
        return hidden_states

    @property
    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Hidden states ``[rows, hidden]`` to logits ``[rows, vocabulary]``; rows >= 1.

        This is the backbone's own `compute_logits`. Zero rows must not reach it: vLLM's gather
        across tensor-parallel CPU workers dies on them (SIGFPE).
        """
        logits: Callable[[torch.Tensor], torch.Tensor] = super().compute_logits  # type: ignore[misc]
        return logits

    @property
    def has_head(self) -> bool:
        """Whether the head is here, and not in a later pipeline stage."""
        return not isinstance(self.lm_head, PPMissingLayer)

    @property
    def has_plain_head(self) -> bool:
        """Whether the head is here, and is a matrix (maybe with a soft cap) for `tiled_head`."""
        if not self.has_head or not is_plain(self.lm_head):
            return False
        return self.logits_processor.scale == 1.0 and getattr(self.lm_head, "bias", None) is None

    def tiled_head(self) -> Head:
        """The same head for what computes no logits; see `checkpoints.tiled_head`.

        Raises:
            ValueError: the head is quantized, or more than a matrix.
        """
        if is_plain(self.lm_head) and not self.has_plain_head:
            raise ValueError(
                f"the head of {type(self).__name__} does more than multiply by a matrix, so that "
                "it cannot be computed by tiles; set dllm.kernels=torch"
            )
        processor = self.logits_processor
        return tiled_head(self.lm_head, processor.org_vocab_size, soft_cap=processor.soft_cap)
