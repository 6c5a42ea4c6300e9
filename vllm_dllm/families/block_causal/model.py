"""The base of the model classes of masked models: everything besides the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_dllm.checkpoints.authors_tensors import one_by_one, shapes_of
from vllm_dllm.checkpoints.verify import VerifiedWeights

if TYPE_CHECKING:
    from vllm_dllm.families.model_state import FamilyModelState
    from vllm_dllm.ops.statistics.head import Head


class MaskedCanvasModel(VerifiedWeights):
    """Comes before vLLM's class among the bases of a model class.

    The backbone is vLLM's. There are two differences: the model state decides the attention mask,
    and logits are never handed to vLLM's own sampler. `compute_logits` passes hidden states
    through, and the readout calls `head` on as many rows at a time as it wants.

    The backbone's `compute_logits` computes logits from `lm_head` and `logits_processor`, as vLLM's
    models do. A class whose backbone does anything else to its logits there overrides
    `has_plain_head` to return False.
    """

    # What an adapter may adapt besides the layers' projections. The head is excluded: vLLM looks up
    # one adapter per request there, and a canvas has L rows.
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
        """Maps hidden states ``[rows, hidden]`` to logits ``[rows, vocabulary]``; rows >= 1.

        This is the backbone's own `compute_logits`. It must not be called with zero rows: vLLM's
        gather across tensor-parallel CPU workers crashes on them (SIGFPE).
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

        Raises:
            ValueError: the head is quantized, or more than a matrix.
        """
        from vllm_dllm.checkpoints.tiled_head import is_plain, tiled_head

        if is_plain(self.lm_head) and not self.has_plain_head:
            raise ValueError(
                f"the head of {type(self).__name__} does more than multiply by a matrix, so that "
                "it cannot be computed in tiles; set dllm.kernels=torch"
            )
        processor = self.logits_processor
        return tiled_head(self.lm_head, processor.org_vocab_size, soft_cap=processor.soft_cap)


class TransformersTensors(MaskedCanvasModel):
    """A model whose checkpoints have exactly the tensors that a class of transformers saves.

    Each expert's matrices are stored separately. Anything else is refused while it is loaded.

    Attributes:
        authors: the class, by its name in transformers.
    """

    authors: ClassVar[str]

    @staticmethod
    def is_linear(name: str) -> bool:
        """See `VerifiedWeights.is_linear`: not the router or head."""
        return name.endswith("_proj.weight")

    @classmethod
    def tensor_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """See `VerifiedWeights.tensor_shapes`."""
        import transformers

        shapes = one_by_one(shapes_of(getattr(transformers, cls.authors), config))
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        return shapes
