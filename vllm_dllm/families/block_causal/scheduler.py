"""vLLM's scheduler with two more rules, both for models whose blocks are aligned.

1. A prefill chunk ends on a block boundary (or with the prompt). A chunk that stopped
   inside a block would write keys and values that never saw the rest of their block.
2. A canvas is scheduled whole or not at all. With little budget left vLLM would schedule part of
   it, and the step would be meaningless.

Both are applied in one hook that vLLM calls for every running and waiting request. The rest of this
file deals with the prompt's tail: vLLM counts from the end of the prompt, while the worker counts
from the start of the prompt's last block, up to L - 1 tokens earlier.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler
from vllm.v1.request import Request

from vllm_dllm.families.scheduling import CommonRules


class BlockDiffusionScheduler(CommonRules):
    """The two rules above, for synchronous scheduling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_length = self.max_model_len
        # vLLM clips a step at max_model_len - position. Its position may be L - 1 past the
        # worker's, plus a window for each step in flight; `_mamba_block_aligned_split` has the
        # exact rule.
        windows = 1 + self.vllm_config.max_concurrent_batches
        self.max_model_len += windows * self.num_spec_tokens
        self.blocks = self.vllm_config.model_config.dllm.settings.blocks

    def add_request(self, request: Request) -> None:
        """Admit a request; its output ends where the context does."""
        # vLLM checks the context length against max_model_len, which is padded here.
        room = self.context_length - request.num_prompt_tokens
        request.max_tokens = min(request.max_tokens, room)
        super().add_request(request)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """The number of tokens to schedule, given that vLLM would schedule ``num_new_tokens``.

        The name is vLLM's: it made this per-request hook for shortening a chunk for Mamba's state
        blocks. 0 makes the request wait for a later step.
        """
        length = self.block_length
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        end, known = start + num_new_tokens, request.num_tokens
        if start >= known:
            # With a window of two blocks, each step in flight counts in full, and at most one of
            # its blocks is accepted.
            width = self.num_spec_tokens
            if self.blocks > 1:
                return self._canvas_of_blocks(request, start, num_new_tokens)
            in_flight = request.num_output_placeholders // width
            return self._canvas(start - in_flight * (width - length), num_new_tokens)
        # A prompt, or a canvas that has left without a commit and is followed by the next one.
        if end > known:
            return known - start + self._canvas(known, end - known)
        if end < known:
            end -= end % length
        return max(end - start, 0)

    def _canvas(self, start: int, tokens: int) -> int:
        """The tokens to schedule of a canvas, given how many the budget holds: L (or 2 L) or 0.

        With a step in flight, `start` assumes that it commits. The canvas after it must fit into
        the context, or this step would run past the end of the block table.
        """
        length, width = self.block_length, self.num_spec_tokens
        fits = start - start % length + length <= self.context_length
        return width if fits and tokens >= width else 0

    def _canvas_of_blocks(self, request: Request, start: int, tokens: int) -> int:
        """`_canvas` for canvases of several blocks; the end of the context may cut the last one.

        They follow each other from the block in which the prompt ends. With a step in flight a cut
        canvas waits for its outcome, because it is unknown whether there is one.
        """
        width, prompt = self.num_spec_tokens, request.num_prompt_tokens
        first = prompt - prompt % self.block_length
        left = self.context_length - (start - (start - first) % width)
        if left < width and request.num_output_placeholders:
            return 0
        whole = min(width, left)
        return whole if whole > 0 and tokens >= whole else 0


class AsyncBlockDiffusionScheduler(BlockDiffusionScheduler, DiffusionAsyncScheduler):
    """`BlockDiffusionScheduler` with one step in flight."""
