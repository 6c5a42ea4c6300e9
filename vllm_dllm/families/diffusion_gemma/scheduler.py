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
        # The last canvas may be cut off by the end of the context; that is whole, too.
        width = diffusion_canvas_width(request, self.block_length)
        whole = min(width, self.max_model_len - start)
        return whole if whole > 0 and num_new_tokens >= whole else 0


class AsyncCanvasScheduler(CanvasScheduler, DiffusionAsyncScheduler):
    """`CanvasScheduler` with one step in flight."""
