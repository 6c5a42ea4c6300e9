"""DiffusionGemma, derived from vLLM's class: same weights and backbone, different head and sampler.

The sampler gets head and embedding by tiles of the vocabulary, so whole logits never exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.diffusion_gemma import DiffusionGemmaForConditionalGeneration
from vllm.model_executor.models.gemma4_mm import Gemma4DummyInputsBuilder
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.utils import extract_layer_index
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform

from vllm_dllm.checkpoints.stored import one_by_one, shapes_of
from vllm_dllm.checkpoints.tiled_head import is_plain, tiled_head
from vllm_dllm.checkpoints.verify import HEAD, VerifiedWeights
from vllm_dllm.families.diffusion_gemma.pictures import GemmaPictureInfo, ReadablePictures
from vllm_dllm.ops.statistics.head import Head

if TYPE_CHECKING:
    from vllm_dllm.families.model_state import FamilyModelState

# Encoder and decoder share their weights.
_HALVES = ("model.decoder.", "model.encoder.language_model.")
_VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


@MULTIMODAL_REGISTRY.register_processor(
    ReadablePictures, info=GemmaPictureInfo, dummy_inputs=Gemma4DummyInputsBuilder
)
class DiffusionGemmaForBlockDiffusion(
    VerifiedWeights, DiffusionGemmaForConditionalGeneration, SupportsLoRA
):
    """google/diffusiongemma-*: text and images in, text out."""

    released_as: ClassVar[str] = "DiffusionGemma"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        window = vllm_config.model_config.dllm.settings.window
        if window == "reference" and current_platform.is_cpu():
            from vllm_dllm.families.diffusion_gemma.reference_window import use_reference_window

            use_reference_window(self)

    @property
    def lora_manager(self) -> Any:
        """VLLM's manager of adapters."""
        return self._lora_manager

    @lora_manager.setter
    def lora_manager(self, manager: Any) -> None:
        """Called by vLLM when it has wrapped the layers, before it loads an adapter."""
        manager.packed_modules = {name: self.fused_from(name) for name in manager.packed_modules}
        self._lora_manager = manager

    def fused_from(self, name: str) -> list[str]:
        """See `VerifiedWeights.fused_from`; the values of full attention are its keys."""
        layers = super().fused_from(name)
        if name.endswith(".qkv_proj"):
            kinds = self.config.text_config.layer_types
            if kinds[extract_layer_index(name)] == "full_attention":
                layers[2] = layers[1]
        return layers

    @staticmethod
    def get_model_state_cls() -> type[FamilyModelState]:
        """The hook through which vLLM's runner gets this package's model state and sampler."""
        from vllm_dllm.families.model_state import FamilyModelState

        return FamilyModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states unchanged: the sampler owns the head."""
        return hidden_states

    @property
    def has_plain_head(self) -> bool:
        """Whether the head is a matrix (with a soft cap) for `tiled_head`."""
        return is_plain(self.lm_head)

    def tiled_head(self) -> Head:
        """The head with the embedding for self-conditioning; see `checkpoints.tiled_head`."""
        embedding = self.model.embed_tokens.weight
        return tiled_head(self.lm_head, self.vocabulary, embedding, self.final_logit_softcapping)

    @staticmethod
    def one_name(name: str) -> str | None:
        """See `VerifiedWeights.one_name`; encoder and decoder share their weights."""
        if "embed_vision.embedding." in name:
            return None
        for half in _HALVES:
            if name.startswith(half):
                return "model." + name.removeprefix(half)
        return name

    @staticmethod
    def vllm_name(name: str) -> str:
        """See `VerifiedWeights.vllm_name`."""
        return name.removeprefix("model.encoder.") if name.startswith(_VISION) else name

    @staticmethod
    def is_linear(name: str) -> bool:
        """See `VerifiedWeights.is_linear`: not the router or self-conditioning."""
        if name.startswith(_VISION):
            return name.endswith((".linear.weight", "_proj.weight", "_projection.weight"))
        return name.endswith("_proj.weight") and ".self_conditioning." not in name

    @classmethod
    def tensor_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """The tensors of transformers' class, each once, under the name from `one_name`."""
        from transformers import DiffusionGemmaForBlockDiffusion as Authors

        found = {cls.one_name(name): shape for name, shape in shapes_of(Authors, config).items()}
        if config.tie_word_embeddings:
            found.pop(HEAD, None)
        return {name: shape for name, shape in found.items() if name is not None}

    @classmethod
    def spellings(cls, config: Any) -> dict[str, list[str]]:
        """See `VerifiedWeights.spellings`; the values of full attention are its keys."""
        names = {
            cls.vllm_name(name).removesuffix(".weight"): _checkpoint_names(name)
            for name in filter(cls.is_linear, one_by_one(cls.tensor_shapes(config)))
        }
        for index, kind in enumerate(config.text_config.layer_types):
            keys = f"model.layers.{index}.self_attn.k_proj"
            if kind == "full_attention":
                names[keys.replace("k_proj", "v_proj")] = [keys, *names[keys]]
        return names


def _checkpoint_names(name: str) -> list[str]:
    """The names that a layer may have, given that of its weight from `one_name`."""
    module = name.removesuffix(".weight")
    if name.startswith(_VISION):
        return [module]
    return [half + module.removeprefix("model.") for half in _HALVES]
