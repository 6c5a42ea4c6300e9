"""The scheduler of canvases that begin right after the prompt: whole ones, or none."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.diffusion_scheduler import diffusion_canvas_width
from vllm.v1.request import Request

from vllm_dllm.families.scheduling import CommonRules


class CanvasScheduler(CommonRules):
    """Schedules canvases that begin right after the prompt, wherever it ends."""

    def tokens_to_schedule(self, request: Request, start: int, tokens: int) -> int:
        """See `CommonRules.tokens_to_schedule`."""
        if start < request.num_tokens:  # prefill
            return tokens
        width = diffusion_canvas_width(request, self.block_length)
        return self._whole_canvas(request, width, self.max_model_len - start, tokens)


class VerifiedCanvasScheduler(CanvasScheduler):
    """`CanvasScheduler` for canvases that may begin with the last known token.

    A draft overwrites its keys and values until a causal pass writes them again, so its page is not
    shared yet; see `engine.verifying_pass`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_final(request: Request, num_computed_tokens: int) -> None:
            cache_blocks(request, min(num_computed_tokens, request.num_tokens - 1))

        coordinator.cache_blocks = cache_final
