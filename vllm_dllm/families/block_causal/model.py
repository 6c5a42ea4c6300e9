"""The base of the model classes of masked models: everything besides the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_dllm.checkpoints.verify import VerifiedWeights

if TYPE_CHECKING:
    from vllm_dllm.families.model_state import FamilyModelState
    from vllm_dllm.ops.statistics.head import Head


class MaskedCanvasModel(VerifiedWeights):
    """Comes before vLLM's class among the bases of a model class.

    The model state decides the attention mask. `compute_logits` passes hidden states through, and
    the readout calls `head`, the backbone's `compute_logits`, on as many rows as it wants. A class
    whose backbone does more there than `lm_head` and `logits_processor` overrides `has_plain_head`
    to return False.
    """

    # What an adapter may adapt besides projections. For the head vLLM looks up one adapter for each
    # request, and a canvas has L rows.
    embedding_modules: ClassVar[dict[str, str]] = {"embed_tokens": "input_embeddings"}

    # vLLM's class defines these.
    lm_head: Any
    logits_processor: Any

    @staticmethod
    def get_model_state_cls() -> type[FamilyModelState]:
        """The hook through which vLLM's runner gets this package's model state and sampler."""
        from vllm_dllm.families.model_state import FamilyModelState

        return FamilyModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states unchanged: the readout owns the head."""
        return hidden_states

    @property
    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Maps hidden states ``[rows, hidden]`` to logits ``[rows, vocabulary]``.

        There is at least one row: vLLM's gather across CPU workers crashes on none (SIGFPE).
        """
        logits: Callable[[torch.Tensor], torch.Tensor] = super().compute_logits  # type: ignore[misc]
        return logits

    @property
    def has_head(self) -> bool:
        """Whether this pipeline stage has the head."""
        return not isinstance(self.lm_head, PPMissingLayer)

    @property
    def has_plain_head(self) -> bool:
        """Whether this stage has a head that is a matrix (maybe soft-capped) for `tiled_head`."""
        from vllm_dllm.checkpoints.tiled_head import is_plain

        if not self.has_head or not is_plain(self.lm_head):
            return False
        return self.logits_processor.scale == 1.0 and getattr(self.lm_head, "bias", None) is None

    def tiled_head(self) -> Head:
        """The same head for Triton kernels, which need no logits; see `checkpoints.tiled_head`.

        Raises ValueError if the head is quantized, or more than a matrix.
        """
        from vllm_dllm.checkpoints.tiled_head import is_plain, tiled_head

        if is_plain(self.lm_head) and not self.has_plain_head:
            raise ValueError(
                f"the head of {type(self).__name__} does more than multiply by a matrix, so that "
                "it cannot be computed in tiles; set dllm.kernels=torch"
            )
        processor = self.logits_processor
        return tiled_head(self.lm_head, processor.org_vocab_size, soft_cap=processor.soft_cap)
