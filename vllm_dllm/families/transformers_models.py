"""Masked models whose checkpoints have the tensors of a class of transformers, on vLLM's backbones.

They are imported where vLLM loads one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.checkpoints.stored import one_by_one, shapes_of
from vllm_dllm.families.block_causal.model import MaskedCanvasModel

if TYPE_CHECKING:
    from vllm_dllm.checkpoints.stored import Weights


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
        shapes = one_by_one(shapes_of(getattr(transformers, cls.authors), config))
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        return shapes


class SDARForCausalLM(TransformersTensors, Qwen3ForCausalLM):
    """SDAR's dense models, TraDo and DiRL."""

    released_as: ClassVar[str] = "SDAR"
    authors: ClassVar[str] = "Qwen3ForCausalLM"


class SDARMoeForCausalLM(TransformersTensors, Qwen3MoeForCausalLM):
    """SDAR's models with experts."""

    released_as: ClassVar[str] = "SDAR"
    authors: ClassVar[str] = "Qwen3MoeForCausalLM"


class StableDiffcoderForCausalLM(TransformersTensors, LlamaForCausalLM):
    """Stable-DiffCoder, Base and Instruct."""

    released_as: ClassVar[str] = "Stable-DiffCoder"
    authors: ClassVar[str] = "LlamaForCausalLM"


class SeedDiffcoderForCausalLM(StableDiffcoderForCausalLM):
    """The same under the name of its first release."""


class Fast_dLLM_QwenForCausalLM(TransformersTensors, Qwen2ForCausalLM):  # noqa: N801
    """Fast-dLLM v2, 1.5B and 7B."""

    released_as: ClassVar[str] = "Fast-dLLM v2"
    authors: ClassVar[str] = "Qwen2ForCausalLM"


class DreamForCausalLM(TransformersTensors, Qwen3ForCausalLM):
    """DreamReasoner-8B."""

    released_as: ClassVar[str] = "DreamReasoner"
    authors: ClassVar[str] = "Qwen3ForCausalLM"


class OpenPanguDiffusionForCausalLM(TransformersTensors, LlamaForCausalLM):
    """openPangu-R-7B-Diffusion."""

    released_as: ClassVar[str] = "openPangu-R"
    authors: ClassVar[str] = "LlamaForCausalLM"


# Nemotron's prefixes of names, and vLLM's.
RENAMED = WeightsMapper(orig_to_new_prefix={"encoder.": "model.", "diffusion_head.": "lm_head."})


class MaskHasNoLogit(MaskedCanvasModel):
    """A model whose mask takes no part in probabilities, which a tiled head does not do."""

    config: Any  # vLLM's class defines it
    has_plain_head: ClassVar[bool] = False  # type: ignore[assignment]

    @property
    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `MaskedCanvasModel.head`; the mask's logit is -inf before the softmax."""
        compute, mask = super().head, self.config.mask_token_id

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            found = compute(hidden)
            found[:, mask] = -torch.inf
            return found

        return logits


class NemotronLabsDiffusionModel(MaskHasNoLogit, TransformersTensors, MistralForCausalLM):
    """nvidia/Nemotron-Labs-Diffusion-*: one head for the diffusion and the causal predictions."""

    released_as: ClassVar[str] = "Nemotron-Labs-Diffusion"
    authors: ClassVar[str] = "Ministral3ForCausalLM"
    # By which vLLM also reads the names of quantized layers and of adapters.
    hf_to_vllm_mapper: ClassVar[WeightsMapper] = MistralForCausalLM.hf_to_vllm_mapper | RENAMED

    @staticmethod
    def vllm_name(name: str) -> str:
        """See `VerifiedWeights.vllm_name`."""
        return RENAMED.map_name(name) or name

    @classmethod
    def tensor_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """See `VerifiedWeights.tensor_shapes`: under the authors' names."""
        theirs = {vllms: theirs for theirs, vllms in RENAMED.orig_to_new_prefix.items()}
        return WeightsMapper(orig_to_new_prefix=theirs).apply_dict(super().tensor_shapes(config))

    def load_verified(self, weights: Weights) -> set[str]:
        """See `VerifiedWeights.load_verified`."""
        return super().load_verified(RENAMED.apply(weights))


class MinistralDiffEncoderModel(NemotronLabsDiffusionModel):
    """The name of the architecture in older checkpoints."""
