"""Input embeddings of a self-conditioned model: tokens, images, and the last prediction."""

from __future__ import annotations

from typing import Any

import torch

from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning


class InputEmbeddings:
    """Computes input embeddings into one buffer, so that CUDA graphs read from a fixed address.

    `state` is the model state, whose base class in vLLM has the vision encoder and its cache.
    """

    def __init__(self, state: Any, conditioning: SelfConditioning) -> None:
        self.state = state
        self.conditioning = conditioning
        size = (state.max_num_tokens, conditioning.soft.shape[-1])
        self.buffer = torch.zeros(size, dtype=conditioning.soft.dtype, device=state.device)
        self.images: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def encode(self, scheduled: dict[str, list[int]], input_batch: Any) -> None:
        """Encode the images of this step's chunks and keep their embeddings for `fill`."""
        self.images = None
        state = self.state
        if not state.supports_mm_inputs:
            return
        hashes, inputs = state.encoder_runner.prepare_mm_inputs(scheduled)
        if inputs:
            outputs = state.encoder_runner.execute_mm_encoder(inputs)
            state.encoder_cache.encoder_outputs.update(zip(hashes, outputs, strict=True))
        embeddings, where = state.gather_mm_embeddings(input_batch)
        if embeddings:
            self.images = (embeddings, where)

    def fill(self, input_batch: Any) -> dict[str, Any]:
        """The model's input for this step, ``inputs_embeds`` ``[tokens, hidden]``."""
        tokens = input_batch.num_tokens
        ids = input_batch.input_ids[:tokens]
        if self.images is None:
            embedded = self.state.model.embed_input_ids(ids)
        else:
            embeddings, where = self.images
            embedded = self.state.model.embed_input_ids(
                ids, multimodal_embeddings=embeddings, is_multimodal=where
            )
            self.images = None
        self.buffer[:tokens].copy_(embedded)
        if input_batch.num_draft_tokens:
            self.conditioning.apply(self.buffer, input_batch)
        return self.dummy(input_batch.num_tokens_after_padding)

    def dummy(self, tokens: int) -> dict[str, Any]:
        """The buffer's start, for profiling and graph capture."""
        return {"inputs_embeds": self.buffer[:tokens]}
