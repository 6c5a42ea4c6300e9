"""What vLLM asks about the pictures that a model reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems, MultiModalDataItems
from vllm.multimodal.processing import BaseProcessingInfo


class PicturesNotEmbeddings(BaseProcessingInfo):
    """Refuses embeddings, which vLLM accepts where an engine loads keys and values.

    Attributes:
        released_as: the model's name for error messages.
        placeholder: for masked models, the id of a picture in a prompt.
    """

    released_as: ClassVar[str]
    placeholder: Any

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """See vLLM's class; no videos, unless it is the first of the bases."""
        return {"image": None}

    def parse_mm_data(
        self, mm_data: Mapping[str, Any], *, validate: bool = True
    ) -> MultiModalDataItems:
        """See vLLM's class; raises ValueError for embeddings."""
        found = super().parse_mm_data(mm_data, validate=False)
        for modality, items in found.items():
            if isinstance(items, EmbeddingItems | DictEmbeddingItems):
                raise ValueError(
                    f"{modality}_embeds: not read by {self.released_as}; send the {modality} itself"
                )
            if validate:
                self.validate_num_items(modality, len(items))
        return found
