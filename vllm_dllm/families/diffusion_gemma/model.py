"""DiffusionGemma, derived from vLLM's class: same weights and backbone, different head and sampler.

`compute_logits` passes hidden states through; `tiled_head` gives the sampler the head and the
embedding one tile of the vocabulary at a time, so whole logits never exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.diffusion_gemma import DiffusionGemmaForConditionalGeneration
from vllm.model_executor.models.gemma4_mm import Gemma4DummyInputsBuilder
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_dllm.checkpoints.tiled_head import is_plain, tiled_head
from vllm_dllm.checkpoints.updates import UpdatableWeights, Weights
from vllm_dllm.checkpoints.verify import HEAD, KV_SCALES, Stored, building, expected, verified
from vllm_dllm.families.diffusion_gemma.pictures import PicturesNotEmbeddings, ReadablePictures
from vllm_dllm.ops.statistics.head import Head

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    from vllm_dllm.families.model_state import FamilyModelState

# Encoder and decoder share their weights.
_HALVES = ("model.decoder.", "model.encoder.language_model.")
_VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


@MULTIMODAL_REGISTRY.register_processor(
    ReadablePictures, info=PicturesNotEmbeddings, dummy_inputs=Gemma4DummyInputsBuilder
)
class DiffusionGemmaForBlockDiffusion(UpdatableWeights, DiffusionGemmaForConditionalGeneration):
    """google/diffusiongemma-*: text and images in, text out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with building(self.quant_config, spellings(vllm_config.model_config.hf_config)):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vocabulary = vllm_config.model_config.get_vocab_size()

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

    def verified_weights(self, weights: Weights, whole: bool) -> Weights:
        """Name the first wrong tensor; tensors of an unknown quantization are not checked."""
        tensors = stored_tensors(self.config, self.quant_config)
        if tensors is None:
            return weights
        beside = None if self.quant_config is None else KV_SCALES
        return verified(weights, tensors, "DiffusionGemma", _one_name, beside, whole)


def stored_tensors(
    config: Any, quant_config: QuantizationConfig | None
) -> dict[str, Stored] | None:
    """Every tensor of a checkpoint, quantized or not, by the name that `_one_name` gives it.

    Quantized experts are stored one by one, with three matrices each. None for a quantization
    method whose tensors are not known here.
    """
    shapes = dict(tensor_shapes(config))
    if quant_config is not None and quant_config.get_name() == "compressed-tensors":
        from vllm_dllm.checkpoints.quantized import scheme_of

        for name in [name for name in shapes if name.endswith(".experts.gate_up_proj")]:
            experts = name.removesuffix(".gate_up_proj")
            if scheme_of(quant_config, f"{experts}.0.gate_proj") is not None:
                count, both, hidden = shapes.pop(name)
                del shapes[f"{experts}.down_proj"]
                shapes |= _one_by_one(experts, count, both // 2, hidden)
    return expected(shapes, quant_config, is_linear, _vllm_name)


def _one_by_one(experts: str, count: int, size: int, hidden: int) -> dict[str, tuple[int, int]]:
    shapes = {}
    for expert in range(count):
        shapes[f"{experts}.{expert}.gate_proj.weight"] = (size, hidden)
        shapes[f"{experts}.{expert}.up_proj.weight"] = (size, hidden)
        shapes[f"{experts}.{expert}.down_proj.weight"] = (hidden, size)
    return shapes


def is_linear(name: str) -> bool:
    """Whether a tensor belongs to a layer that vLLM's class can quantize.

    It builds the router and self-conditioning without quantization.
    """
    if name.startswith(_VISION):
        return name.endswith((".linear.weight", "_proj.weight", "_projection.weight"))
    return name.endswith("_proj.weight") and ".self_conditioning." not in name


def spellings(config: Any) -> dict[str, list[str]]:
    """Map vLLM's name of each layer that can be quantized to its names in checkpoints.

    A full-attention layer uses its keys as values, so what a checkpoint says about the keys also
    holds for the values that vLLM fuses with them.
    """
    names: dict[str, list[str]] = {}
    text = config.text_config
    for shape_name, shape in tensor_shapes(config).items():
        if shape_name.endswith(".experts.gate_up_proj"):
            experts = shape_name.removesuffix(".gate_up_proj")
            names |= {
                _vllm_name(name).removesuffix(".weight"): _checkpoint_names(name)
                for name in _one_by_one(experts, *shape)
            }
        elif is_linear(shape_name):
            names[_vllm_name(shape_name).removesuffix(".weight")] = _checkpoint_names(shape_name)
    for index, kind in enumerate(text.layer_types):
        keys = f"model.layers.{index}.self_attn.k_proj"
        if kind == "full_attention":
            names[keys.replace("k_proj", "v_proj")] = [keys, *names[keys]]
    return names


def _checkpoint_names(name: str) -> list[str]:
    """The names that a layer may have, from the name that `_one_name` gives its weight."""
    module = name.removesuffix(".weight")
    if name.startswith(_VISION):
        return [module]
    return [half + module.removeprefix("model.") for half in _HALVES]


def _vllm_name(name: str) -> str:
    """Map the name that `_one_name` gives a tensor to vLLM's name."""
    return name.removeprefix("model.encoder.") if name.startswith(_VISION) else name


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor of an unquantized checkpoint, as transformers' class would have it.

    Encoder and decoder share their weights, and a checkpoint may use either name or both, so each
    tensor is listed once, under the name that `_one_name` gives it.
    """
    from transformers import DiffusionGemmaForBlockDiffusion as Authors

    with torch.device("meta"):
        tensors = Authors(config).state_dict()
    shapes = {_one_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        shapes.pop(HEAD, None)
    return {name: shape for name, shape in shapes.items() if name is not None}


def _one_name(name: str) -> str | None:
    """One name for both copies of a shared tensor; None for tensors that vLLM's loader skips."""
    if "embed_vision.embedding." in name:
        return None
    for half in _HALVES:
        if name.startswith(half):
            return "model." + name.removeprefix(half)
    return name
