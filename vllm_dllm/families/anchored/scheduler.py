"""The scheduler of canvases that begin right after the prompt: whole ones, or none.

With little budget left vLLM would schedule part of a canvas, and the step would be meaningless.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.diffusion_scheduler import (
    DiffusionAsyncScheduler,
    diffusion_canvas_width,
)
from vllm.v1.request import Request

from vllm_dllm.families.scheduling import CommonRules


class CanvasScheduler(CommonRules):
    """Schedules canvases that begin right after the prompt, wherever it ends."""

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """The number of tokens to schedule, given that vLLM would schedule ``num_new_tokens``."""
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        if start < request.num_tokens:  # prefill
            return num_new_tokens
        width = diffusion_canvas_width(request, self.block_length)
        whole = self._whole_canvas(request, start, width)
        return whole if whole > 0 and num_new_tokens >= whole else 0

    def _whole_canvas(self, request: Request, start: int, width: int) -> int:
        """The tokens of the canvas at `start`; the end of the context may cut the last one."""
        return min(width, self.max_model_len - start)


class VerifiedCanvasScheduler(CanvasScheduler):
    """`CanvasScheduler` for canvases that may begin with the last known token.

    See `engine.verifying_pass`.
    A draft overwrites the keys and values of that token until a causal pass writes them again, so
    its page is not shared yet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_final(request: Request, num_computed_tokens: int) -> None:
            cache_blocks(request, min(num_computed_tokens, request.num_tokens - 1))

        coordinator.cache_blocks = cache_final


class AsyncCanvasScheduler(CanvasScheduler, DiffusionAsyncScheduler):
    """`CanvasScheduler` with one step in flight."""

    def _whole_canvas(self, request: Request, start: int, width: int) -> int:
        """See `CanvasScheduler`; 0 while the start of the canvas is unknown and that matters.

        vLLM assumes that the step in flight commits. If it does not, the canvas has not moved, so
        its tokens must not be counted from the position after it.
        """
        if request.num_output_placeholders and start + width > self.max_model_len:
            return 0
        return super()._whole_canvas(request, start, width)


class AsyncVerifiedCanvasScheduler(VerifiedCanvasScheduler, AsyncCanvasScheduler):
    """`VerifiedCanvasScheduler` with one step in flight."""
