"""Input embeddings of models that read pictures: tokens, features, and what a canvas adds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import to_device

if TYPE_CHECKING:
    from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning

logger = init_logger("vllm.dllm")


class InputEmbeddings:
    """Computes input embeddings into one buffer, so that CUDA graphs read from a fixed address.

    `state` is the model state, whose base class in vLLM has the vision encoder and its cache.
    `conditioning` has the predictions of a self-conditioned model, and `tails` the features of an
    aligned one that its first canvases begin with.
    """

    def __init__(
        self, state: Any, conditioning: SelfConditioning | None = None, tails: Tails | None = None
    ) -> None:
        self.state, self.conditioning, self.tails = state, conditioning, tails
        size = (state.max_num_tokens, state.inputs_embeds_size)
        self.buffer = torch.zeros(size, dtype=state.dtype, device=state.device)
        self.images: tuple[list[torch.Tensor], torch.Tensor] | None = None
        # Identifiers of images on which the vision encoder has failed.
        self.failed: set[str] = set()

    def clear(self, slot: int) -> None:
        """Forget the request that was in a slot, because a new one has entered it."""
        for kept in (self.conditioning, self.tails):
            if kept is not None:
                kept.clear(slot)

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
        ids, where = input_batch.input_ids[:tokens], None
        if self.images is None:
            embedded = self.state.model.embed_input_ids(ids)
        else:
            embeddings, where = self.images
            embedded = self.state.model.embed_input_ids(
                ids, multimodal_embeddings=embeddings, is_multimodal=where
            )
            self.images = None
        self.buffer[:tokens].copy_(embedded)
        if self.tails is not None:
            self.tails.apply(self.buffer, input_batch, where)
            if (window := self.state.parts.window) is not None:
                window.keep_prompts(input_batch, self.state.prepared.slot_mappings)
        if self.conditioning is not None and input_batch.num_draft_tokens:
            self.conditioning.apply(self.buffer, input_batch)
        return self.dummy(input_batch.num_tokens_after_padding)

    def dummy(self, tokens: int) -> dict[str, Any]:
        """Return the start of the buffer, for profiling and graph capture."""
        return {"inputs_embeds": self.buffer[:tokens]}


class Tails:
    """Keeps the features in the tails of prompts, and puts them into the model's input embeddings.

    The tail is read again with each pass over the first canvas. To vLLM the prompt has been
    computed by then, so that it may have dropped the picture.

    Attributes:
        features: ``[slots, L, hidden]`` in the model's dtype, by position in the tail's block.
        is_picture: bool ``[slots, L]``, whether a position has a feature.
        start: int64 ``[slots]``, the position at which the block begins.
        has_any: bool ``[slots]`` in host memory, whether a slot has a feature.
    """

    def __init__(self, slots: SlotState, hidden_size: int, dtype: torch.dtype) -> None:
        count, self.length = len(slots.phase), slots.kind.block_length
        size = count, self.length, hidden_size
        self.features = torch.zeros(size, dtype=dtype, device=slots.device)
        self.is_picture = torch.zeros(size[:2], dtype=torch.bool, device=slots.device)
        self.start = torch.zeros(count, dtype=torch.int64, device=slots.device)
        self.has_any: np.ndarray = np.zeros(count, dtype=bool)

    def clear(self, slot: int) -> None:
        """Drop the features of ``slot``, because a new request has entered it."""
        if self.has_any[slot]:
            self.has_any[slot] = False
            self.is_picture[slot] = False

    def apply(
        self, embeddings: torch.Tensor, input_batch: Any, is_picture: torch.Tensor | None
    ) -> None:
        """Put features into the embeddings ``[tokens, hidden]`` of a step, in place.

        Those of `is_picture` (bool ``[tokens]`` in host memory; None for none) are there already.
        """
        if is_picture is not None:
            self._keep(embeddings, input_batch, is_picture)
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        if not self.has_any[slots].any():
            return
        of_token: np.ndarray = np.repeat(slots, input_batch.num_scheduled_tokens[: len(slots)])
        slot = to_device(of_token.astype(np.int64), self.start.device)
        place = input_batch.positions[: len(slot)] - self.start[slot]
        inside = (place >= 0) & (place < self.length)
        place = place.clamp(0, self.length - 1)
        chosen = inside & self.is_picture[slot, place]
        plain = embeddings[: len(slot)]
        plain.copy_(torch.where(chosen[:, None], self.features[slot, place], plain))

    def _keep(self, embeddings: torch.Tensor, input_batch: Any, is_picture: torch.Tensor) -> None:
        """Keep the features in the tails of the prompts that end in this step."""
        for row, slot in enumerate(input_batch.idx_mapping_np[: input_batch.num_reqs]):
            prompt, first = input_batch.prefill_len_np[row], input_batch.num_computed_tokens_np[row]
            start = prompt - prompt % self.length
            end = first + input_batch.num_scheduled_tokens[row]
            token = input_batch.query_start_loc_np[row] + start - first
            tail = slice(token, token + prompt - start)
            if not first <= start < prompt <= end or not is_picture[tail].any():
                continue
            self.has_any[slot] = True
            self.start[slot] = int(start)
            self.is_picture[slot, : prompt - start] = is_picture[tail].to(self.start.device)
            self.features[slot, : prompt - start] = embeddings[tail]
