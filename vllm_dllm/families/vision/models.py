"""Masked models that read pictures: vLLM's vision parts beside vLLM's text models.

vLLM imports this where it loads one of them, and where it takes requests to one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

import cv2
import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PixtralVisionModel, Qwen3ForCausalLM, SiglipVisionModel
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionMultiModalProjector,
)
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.llava import BaseLlavaMultiModalProcessor, LlavaDummyInputsBuilder
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessingInfo,
)
from vllm.model_executor.models.mistral3 import Mistral3ForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY, processing
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageSize

from vllm_dllm.checkpoints.stored import shapes_of
from vllm_dllm.families.block_causal.model import MaskedCanvasModel
from vllm_dllm.families.transformers_models import MaskHasNoLogit, NemotronLabsDiffusionModel
from vllm_dllm.families.vision.processing import PicturesNotEmbeddings
from vllm_dllm.ranges import listed


class MaskedPicturesModel(MaskedCanvasModel):
    """Comes before vLLM's class among the bases, which has the text model as `language_model`.

    Attributes:
        picture: the text of a picture in a prompt, for templates that do not render one.
        linear_ends: how the names of tensors end whose layers vLLM can quantize.
    """

    packed_modules_mapping = Mistral3ForConditionalGeneration.packed_modules_mapping
    picture: ClassVar[str]
    linear_ends: ClassVar[tuple[str, ...]]
    hf_to_vllm_mapper: ClassVar[WeightsMapper]
    lm_head: Any = property(attrgetter("language_model.lm_head"))
    logits_processor: Any = property(attrgetter("language_model.logits_processor"))
    # The parts have the same names in all of vLLM's classes; adapters adapt the text model only.
    get_mm_mapping = Mistral3ForConditionalGeneration.get_mm_mapping

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """See vLLM's class."""
        return cls.picture

    @classmethod
    def is_linear(cls, name: str) -> bool:  # type: ignore[override]
        """See `VerifiedWeights.is_linear`."""
        return name.endswith(cls.linear_ends)

    @classmethod
    def vllm_name(cls, name: str) -> str:  # type: ignore[override]
        """See `VerifiedWeights.vllm_name`."""
        return cls.hf_to_vllm_mapper.map_name(name) or name


def joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One mapping of the tensors of a model's parts, whose prefixes are the keys."""
    return {f"{part}{name}": it for part, tensors in parts.items() for name, it in tensors.items()}


class PictureProcessor(processing.BaseMultiModalProcessor[Any]):
    """Makes the pixels of each picture by itself, so that they can be cached by picture.

    Attributes:
        options: the ``mm_processor_kwargs`` that it reads.
    """

    options: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def pixels(self, picture: Image.Image, **options: Any) -> dict[str, torch.Tensor]:
        """What the encoder gets for an RGB picture; raises ValueError if it cannot be read."""

    def get_dummy_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> processing.ProcessorInputs:
        """See vLLM's class."""
        data = self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        prompt = [self.info.placeholder] * mm_counts.get("image", 0)
        return processing.ProcessorInputs(prompt, self.info.parse_mm_data(data, validate=False))

    def _call_hf_processor(
        self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        options = self.info.ctx.get_merged_mm_kwargs(hf_kwargs)
        if unknown := sorted(options.keys() - self.options):
            raise ValueError(f"mm_processor_kwargs: {listed(unknown)}: not read; remove it")
        made = [self.pixels(picture, **options) for picture in hf_data["images"]]
        fields = {name: [one[name] for one in made] for name in made[0]}
        dtype = self.info.ctx.model_config.dtype
        fields["pixel_values"] = [one.to(dtype) for one in fields["pixel_values"]]
        return BatchFeature(fields)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            name: MultiModalFieldConfig.batched("image", keep_on_cpu=name != "pixel_values")
            for name in hf_inputs
        }


# ---- Nemotron-Labs-Diffusion-VLM

# The ids of the authors' processor; no file of a checkpoint has them. A picture is one START in a
# rendered chat and becomes START, then PAD for each column and BREAK for each row, the last of
# which is END instead.
START, PAD, BREAK, END = 18, 19, 20, 21
# The longest edge of a picture in pixels; longer ones are scaled down to it.
LONGEST = 1400
# CLIP's.
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)


def longest_edge(options: Mapping[str, Any]) -> int:
    """The longest edge of a picture in pixels, given ``mm_processor_kwargs``; or ValueError."""
    longest = options.get("max_image_size", LONGEST)
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        raise ValueError(f"mm_processor_kwargs: max_image_size={longest!r} is no number of pixels")
    return longest


class NemotronPictureInfo(PicturesNotEmbeddings):
    """See `PicturesNotEmbeddings`."""

    released_as: ClassVar[str] = "Nemotron-Labs-Diffusion-VLM"
    placeholder: Any = START

    @property
    def cell(self) -> int:
        """The edge of a feature in pixels."""
        config: Any = self.get_hf_config()
        return int(config.vision_config.patch_size * config.spatial_merge_size)

    def get_image_size_with_most_features(self) -> ImageSize:
        """The largest square."""
        edge = longest_edge(self.ctx.get_merged_mm_kwargs({}))
        return ImageSize(edge, edge)


class NemotronPictures(PictureProcessor):
    """The authors' ``image_processing.py``."""

    options: ClassVar[frozenset[str]] = frozenset({"max_image_size"})

    def pixels(self, picture: Image.Image, **options: Any) -> dict[str, torch.Tensor]:
        """See `PictureProcessor.pixels`: float32 ``[3, height, width]``."""
        longest, cell = longest_edge(options), self.info.cell
        values = np.asarray(picture, dtype=np.float32)
        height, width, _ = values.shape
        edges, ratio = (width, height), max(width, height) / longest
        if ratio > 1:
            edges = round(width / ratio), round(height / ratio)
        if not min(edges):
            raise ValueError(
                f"image: of {width} x {height} pixels one edge vanishes when the other is scaled "
                f"to {longest}; cut the picture"
            )
        size = [((edge - 1) // cell + 1) * cell for edge in edges]
        # Without antialiasing, and with values outside of [0, 255] kept.
        resized = cv2.resize(values, size, interpolation=cv2.INTER_CUBIC)
        normalised = (resized / np.float32(255) - MEAN) / DEVIATION
        return {"pixel_values": torch.from_numpy(normalised.transpose(2, 0, 1).copy())}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Sequence[processing.PromptUpdate]:
        def tokens(item: int) -> processing.PromptUpdateDetails:
            _, height, width = out_mm_kwargs["image"][item]["pixel_values"].data.shape
            row = [PAD] * (width // self.info.cell) + [BREAK]
            rows = row * (height // self.info.cell)
            return processing.PromptUpdateDetails.select_token_id([START, *rows[:-1], END], PAD)

        return [processing.PromptReplacement("image", [START], tokens)]


@MULTIMODAL_REGISTRY.register_processor(
    NemotronPictures, info=NemotronPictureInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class NemotronLabsDiffusionVLMModel(
    MaskHasNoLogit, MaskedPicturesModel, Mistral3ForConditionalGeneration
):
    """nvidia/Nemotron-Labs-Diffusion-VLM-8B: text and images in, text out."""

    released_as: ClassVar[str] = "Nemotron-Labs-Diffusion-VLM"
    picture: ClassVar[str] = "<|image_start|>"
    supports_mm_device_do_normalize: ClassVar[bool] = False
    linear_ends: ClassVar[tuple[str, ...]] = ("_proj.weight", "linear_1.weight", "linear_2.weight")
    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "encoder.vision_tower.": "vision_tower.",
            "encoder.multi_modal_projector.": "multi_modal_projector.",
            "encoder.": "language_model.model.",
            "diffusion_head.": "language_model.lm_head.",
        },
        orig_to_new_suffix=Mistral3ForConditionalGeneration.hf_to_vllm_mapper.orig_to_new_suffix,
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        norm = getattr(self.multi_modal_projector, "norm", None)
        if norm is not None:  # vLLM's class has a constant
            norm.variance_epsilon = self.config.rms_norm_eps

    @classmethod
    def tensor_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """See `VerifiedWeights.tensor_shapes`."""
        parts = {
            "encoder.vision_tower.": shapes_of(PixtralVisionModel, config.vision_config),
            "encoder.multi_modal_projector.": shapes_of(Mistral3MultiModalProjector, config),
        }
        return NemotronLabsDiffusionModel.tensor_shapes(config.text_config) | joined(parts)


# ---- SDAR-VL

_TOWER = "vision_tower.vision_model."
# What the features do not pass through.
_UNREAD = (f"{_TOWER}post_layernorm.", f"{_TOWER}head.")


class AnyresInfo(PicturesNotEmbeddings, LlavaOnevisionProcessingInfo):
    """See `PicturesNotEmbeddings`."""

    released_as: ClassVar[str] = "SDAR-VL"
    placeholder: Any = property(lambda self: self.get_hf_config().image_token_index)

    @cached_property
    def cutter(self) -> Any:
        """The processor of transformers that resamples with PIL, as the authors' did."""
        model = self.ctx.model_config
        return LlavaOnevisionImageProcessorPil.from_pretrained(model.model, revision=model.revision)


class AnyresPictures(PictureProcessor, BaseLlavaMultiModalProcessor[AnyresInfo]):
    """The whole picture as a square, then squares of it at the resolution that fits best."""

    def pixels(self, picture: Image.Image, **options: Any) -> dict[str, torch.Tensor]:
        """See `PictureProcessor.pixels`: ``[squares, 3, height, width]``, and height and width."""
        made = self.info.cutter(picture, return_tensors="pt")
        return {name: made[name][0] for name in ("pixel_values", "image_sizes")}


@MULTIMODAL_REGISTRY.register_processor(
    AnyresPictures, info=AnyresInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class SDARVForConditionalGeneration(
    MaskedPicturesModel, LlavaOnevisionForConditionalGeneration, SupportsLoRA
):
    """JetLM/SDAR-VL-*: text and images in, text out."""

    released_as: ClassVar[str] = "SDAR-VL"
    picture: ClassVar[str] = "<|image_pad|>"
    linear_ends: ClassVar[tuple[str, ...]] = ("_proj.weight", "fc1.weight", "fc2.weight")

    @staticmethod
    def one_name(name: str) -> str | None:
        """See `VerifiedWeights.one_name`."""
        return None if name.startswith(_UNREAD) else name

    @classmethod
    def tensor_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """See `VerifiedWeights.tensor_shapes`."""
        parts = {
            "language_model.": shapes_of(Qwen3ForCausalLM, config.text_config),
            _TOWER: shapes_of(SiglipVisionModel, config.vision_config),
            "multi_modal_projector.": shapes_of(LlavaOnevisionMultiModalProjector, config),
        }
        found = joined(parts)
        if config.text_config.tie_word_embeddings:
            del found["language_model.lm_head.weight"]
        found["image_newline"] = (config.text_config.hidden_size,)
        return {name: it for name, it in found.items() if cls.one_name(name)}
