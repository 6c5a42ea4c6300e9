"""An engine that loads keys and values reads no images as embeddings, unless it is told to.

vLLM lets such an engine accept them, and even leave them out, because it loads the keys and values
of images with those of text. Ours does not (`kv_transfer.connector`), and vLLM's Gemma 4 asserts
that there are none, which would end the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap


def apply() -> None:
    """Decide about embeddings as if there were no connector, for our models."""
    from vllm.config import VllmConfig

    wrap(VllmConfig, "_resolve_mm_embedding_inputs", _without_a_connector)


def _without_a_connector(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def resolve_mm_embedding_inputs(self: Any) -> None:
        if not is_ours(self.model_config):
            original(self)
            return
        transfer, self.kv_transfer_config = self.kv_transfer_config, None
        try:
            original(self)
        finally:
            self.kv_transfer_config = transfer

    return resolve_mm_embedding_inputs
