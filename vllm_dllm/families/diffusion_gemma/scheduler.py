"""The scheduler of DiffusionGemma: a canvas is scheduled whole or not at all.

With little budget left vLLM would hand out part of a canvas, and the step would be meaningless.
"""

from __future__ import annotations

from vllm.v1.core.sched.diffusion_scheduler import (
    DiffusionAsyncScheduler,
    diffusion_canvas_width,
)
from vllm.v1.request import Request

from vllm_dllm.families.scheduling import CommonRules


class CanvasScheduler(CommonRules):
    """For canvases that begin behind the prompt, wherever that ends."""

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Number of tokens to schedule, given that vLLM would schedule ``num_new_tokens``."""
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
        """Tokens of the canvas at `start`: the end of the context may cut off the last one."""
        return min(width, self.max_model_len - start)


class AsyncCanvasScheduler(CanvasScheduler, DiffusionAsyncScheduler):
    """`CanvasScheduler` with one step in flight."""

    def _whole_canvas(self, request: Request, start: int, width: int) -> int:
        """See `CanvasScheduler`; 0 while it is unknown where the canvas begins, and that matters.

        vLLM takes the step in flight to be a commit. If it is not, the canvas is still where it
        was, so its tokens must not be counted from behind it.
        """
        if request.num_output_placeholders and start + width > self.max_model_len:
            return 0
        return super()._whole_canvas(request, start, width)
