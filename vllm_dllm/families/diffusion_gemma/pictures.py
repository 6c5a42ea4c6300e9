"""Accepts only pictures and videos that the vision encoder can read.

Others are refused before they reach a worker, where one request's error would fail the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.models.diffusion_gemma import DiffusionGemmaProcessingInfo
from vllm.model_executor.models.gemma4_mm import Gemma4MultiModalProcessor

from vllm_dllm.families.vision.processing import PicturesNotEmbeddings

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput

FIELDS = {
    "image": ("pixel_values", "pixel_position_ids"),
    "video": ("pixel_values_videos", "pixel_position_ids_videos"),
}


class GemmaPictureInfo(DiffusionGemmaProcessingInfo, PicturesNotEmbeddings):
    """What vLLM asks about pictures."""

    released_as: ClassVar[str] = "DiffusionGemma"


class ReadablePictures(Gemma4MultiModalProcessor):
    """VLLM's processor for Gemma 4, which also checks the result for each picture."""

    def apply(self, inputs: Any, timing_ctx: Any) -> MultiModalInput:
        """See vLLM's class; raises ValueError for a picture that the encoder cannot read."""
        made = super().apply(inputs, timing_ctx)
        vision = self.info.get_hf_config().vision_config
        for modality, items in made["mm_kwargs"].items():
            places = made["mm_placeholders"][modality]
            for item, place in zip(items, places, strict=True):
                # An item that is in the worker's cache has been checked.
                if item is not None and modality in FIELDS:
                    patches, positions = (item[field].data for field in FIELDS[modality])
                    check_patches(vision, patches, positions, place.get_num_embeds())
        return made


def check_patches(vision: Any, patches: torch.Tensor, positions: torch.Tensor, places: int) -> None:
    """Raise ValueError if the vision encoder cannot read a picture, or the frames of a video.

    Args:
        vision: the checkpoint's ``vision_config``.
        patches: ``[..., patches, values]``.
        positions: integers ``[..., patches, 2]``, the column and row of each patch; -1 for padding.
        places: the number of embeddings for which the prompt has places.
    """
    rows, widest = vision.position_embedding_size, int(positions.max()) + 1
    if widest > rows:
        raise ValueError(
            f"a picture is {widest} patches wide or high, and the model has {rows} positions; "
            "lower max_soft_tokens of mm_processor_kwargs, or send a picture that is less elongated"
        )
    pooled = vision.pooling_kernel_size**2
    read = int((positions >= 0).all(-1).sum())
    if patches.shape[-1] != 3 * vision.patch_size**2 or read != places * pooled:
        raise ValueError(
            f"mm_processor_kwargs: they make {read} patches of {patches.shape[-1]} values from a "
            f"picture, and the model reads {places * pooled} of {3 * vision.patch_size**2}; "
            "remove all of them but max_soft_tokens"
        )
