"""The scheduler of aligned canvases for prompts with pictures."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from vllm_dllm.families.block_causal.scheduler import BlockDiffusionScheduler


class PictureBlockScheduler(BlockDiffusionScheduler):
    """Ends a chunk on a block boundary also where vLLM cuts it before a picture."""

    def _try_schedule_encoder_inputs(
        self, request: Request, start: int, wanted: int, budget: int, **others: Any
    ) -> Any:
        """See vLLM's class: inputs to encode, tokens to read, the budget that is left, and others.

        A chunk needs all pictures of its blocks. While some of them do not fit, a request holds
        none, or two requests would wait for each other.
        """
        found = super()._try_schedule_encoder_inputs(request, start, wanted, budget, **others)
        end = start + found[1]
        if found[1] < wanted:
            end = max(start, end - end % self.block_length)
            if end == start:
                self.encoder_cache_manager.free(request)
                return [], 0, budget, [], []
        return found[0], end - start, *found[2:]
