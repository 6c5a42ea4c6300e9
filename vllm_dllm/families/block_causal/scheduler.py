"""vLLM's scheduler with two more rules, both for models whose blocks are aligned.

1. A prefill chunk ends on a block boundary (or with the prompt). A chunk that stopped
   inside a block would write keys and values that never saw the rest of their block.
2. A canvas is scheduled whole or not at all.

The rest of this file deals with the prompt's tail: vLLM counts from the end of the prompt, while
the worker counts from the start of the prompt's last block, up to L - 1 tokens earlier.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from vllm_dllm.families.scheduling import CommonRules


class BlockDiffusionScheduler(CommonRules):
    """The two rules above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_length = self.max_model_len
        # vLLM clips a step at max_model_len - position. Its position may be L - 1 past the
        # worker's, plus a window for each step in flight; `tokens_to_schedule` has the exact rule.
        windows = 1 + self.vllm_config.max_concurrent_batches
        self.max_model_len += windows * self.num_spec_tokens
        self.blocks = self.vllm_config.model_config.dllm.settings.blocks

    def add_request(self, request: Request) -> None:
        """Admit a request; its output ends where the context does."""
        # vLLM checks the context length against max_model_len, which is padded here.
        room = self.context_length - request.num_prompt_tokens
        request.max_tokens = min(request.max_tokens, room)
        super().add_request(request)

    def tokens_to_schedule(self, request: Request, start: int, tokens: int) -> int:
        """See `CommonRules.tokens_to_schedule`."""
        length = self.block_length
        end, known = start + tokens, request.num_tokens
        if start >= known:
            # With a window of two blocks, each step in flight counts in full, and at most one of
            # its blocks is accepted.
            width = self.num_spec_tokens
            if self.blocks > 1:
                return self._canvas_of_blocks(request, start, tokens)
            in_flight = request.num_output_placeholders // width
            return self._canvas(start - in_flight * (width - length), tokens)
        # A prompt, or a canvas that has left without a commit and is followed by the next one.
        if end > known:
            return known - start + self._canvas(known, end - known)
        if end < known:
            end -= end % length
        return max(end - start, 0)

    def _canvas(self, start: int, tokens: int) -> int:
        """The tokens to schedule of a canvas, given how many the budget holds: L (or 2 L) or 0.

        The canvas after a step in flight must fit into the context, or this step would run past the
        end of the block table.
        """
        length, width = self.block_length, self.num_spec_tokens
        fits = start - start % length + length <= self.context_length
        return width if fits and tokens >= width else 0

    def _canvas_of_blocks(self, request: Request, start: int, tokens: int) -> int:
        """`_canvas` for canvases of several blocks; the end of the context may cut the last one."""
        width, prompt = self.num_spec_tokens, request.num_prompt_tokens
        first = prompt - prompt % self.block_length
        left = self.context_length - (start - (start - first) % width)
        return self._whole_canvas(request, width, left, tokens)
