"""Input embeddings of a self-conditioned model: tokens, images, and the last prediction."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning

logger = init_logger("vllm.dllm")


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
        # Identifiers of images on which the vision encoder has failed.
        self.failed: set[str] = set()

    def encode(self, scheduled: dict[str, list[int]], input_batch: Any) -> None:
        """Encode the images of this step's chunks and keep their embeddings for `fill`."""
        self.images = None
        state = self.state
        if not state.supports_mm_inputs:
            return
        scheduled = self._with_failed(scheduled, input_batch)
        features = state.encoder_cache.mm_features
        images = {
            features[request][n].identifier: (features[request][n].mm_position, request)
            for request, numbers in scheduled.items()
            for n in numbers
        }
        names, inputs = state.encoder_runner.prepare_mm_inputs(scheduled)
        for name, one in zip(names, self._encoded(inputs), strict=True):
            position, request = images[name]
            tokens = position.get_num_embeds()
            if one is None or len(one) != tokens:
                logger.error("dllm: requests with image %s end with an error", name)
                self.failed.add(name)
                # The sampler ends exactly the requests whose hidden states are NaN, so no request
                # that shares the image, or its keys and values, is answered without it.
                one = self.buffer.new_full((tokens, self.buffer.shape[-1]), math.nan)
                state.slots.spoiled[state.slot_of[request]] = True
            else:
                self.failed.discard(name)
            state.encoder_cache.encoder_outputs[name] = one
        embeddings, where = state.gather_mm_embeddings(input_batch)
        if embeddings:
            self.images = (embeddings, where)

    def _encoded(self, inputs: list[Any]) -> list[torch.Tensor | None]:
        """The embeddings of each image ``[tokens, hidden]``; None if it fails on the only rank."""
        if not inputs:
            return []
        try:
            return list(self.state.encoder_runner.execute_mm_encoder(inputs))
        except Exception:
            logger.exception("dllm: the vision encoder failed")
            self.state.end_if_not_alone()
            if len(inputs) > 1:
                return [one for alone in inputs for one in self._encoded([alone])]
            return [None]

    def _with_failed(
        self, scheduled: dict[str, list[int]], input_batch: Any
    ) -> dict[str, list[int]]:
        """Retry images that failed before, which the scheduler considers encoded."""
        if not self.failed:
            return scheduled
        cache, again = self.state.encoder_cache, dict(scheduled)
        prompts = input_batch.num_computed_tokens_np < input_batch.prefill_len_np
        for request, is_prompt in zip(input_batch.req_ids, prompts, strict=True):
            for n, feature in enumerate(cache.mm_features[request] if is_prompt else ()):
                if feature.identifier in self.failed and feature.data is not None:
                    cache.encoder_outputs.pop(feature.identifier, None)
                    again[request] = sorted({*again.get(request, ()), n})
        return again

    def fill(self, input_batch: Any) -> dict[str, Any]:
        """Return the model's input for this step, ``inputs_embeds`` ``[tokens, hidden]``."""
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
        """Return the start of the buffer, for profiling and graph capture."""
        return {"inputs_embeds": self.buffer[:tokens]}
