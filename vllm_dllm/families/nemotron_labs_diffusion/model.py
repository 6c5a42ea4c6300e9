"""Nemotron-Labs-Diffusion on vLLM's Mistral backbone, under the authors' names of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.families.block_causal.model import TransformersTensors

if TYPE_CHECKING:
    from vllm_dllm.checkpoints.stored import Weights

# The authors' prefixes of names, and vLLM's.
RENAMED = {"encoder.": "model.", "diffusion_head.": "lm_head."}


class NemotronLabsDiffusionModel(TransformersTensors, MistralForCausalLM):
    """nvidia/Nemotron-Labs-Diffusion-*: one head for the diffusion and the causal predictions."""

    released_as: ClassVar[str] = "Nemotron-Labs-Diffusion"
    authors: ClassVar[str] = "Ministral3ForCausalLM"
    # By which vLLM also reads the names of quantized layers and of adapters.
    hf_to_vllm_mapper: ClassVar[WeightsMapper] = MistralForCausalLM.hf_to_vllm_mapper | (
        WeightsMapper(orig_to_new_prefix=RENAMED)
    )

    # The mask takes no part in probabilities, which a tiled head does not do.
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

    @staticmethod
    def vllm_name(name: str) -> str:
        """See `VerifiedWeights.vllm_name`."""
        for theirs, vllms in RENAMED.items():
            if name.startswith(theirs):
                return vllms + name.removeprefix(theirs)
        return name

    @classmethod
    def tensor_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """See `VerifiedWeights.tensor_shapes`: under the authors' names."""
        theirs = {vllms: theirs for theirs, vllms in RENAMED.items()}
        shapes = super().tensor_shapes(config)
        parts = {name: name.partition(".") for name in shapes}
        return {theirs[f"{parts[n][0]}."] + parts[n][2]: shape for n, shape in shapes.items()}

    @classmethod
    def spellings(cls, config: Any) -> dict[str, list[str]]:
        """See `VerifiedWeights.spellings`."""
        names = (n.removesuffix(".weight") for n in cls.tensor_shapes(config) if cls.is_linear(n))
        return {cls.vllm_name(name): [name] for name in names}

    def load_verified(self, weights: Weights) -> set[str]:
        """See `VerifiedWeights.load_verified`."""
        return super().load_verified((self.vllm_name(name), tensor) for name, tensor in weights)


class MinistralDiffEncoderModel(NemotronLabsDiffusionModel):
    """The name of the architecture in older checkpoints."""
