"""vLLM's scheduler with two rules more, both for block-diffusion models.

1. A prefill chunk ends on a block boundary (or with the prompt). A chunk that stopped
   inside a block would write keys and values that never saw the rest of their block.
2. A canvas is scheduled whole or not at all. With little budget left vLLM would hand out
   part of it, and the step would be meaningless.

Both are in one hook that vLLM calls for every running and waiting request. The rest of this file
follows from the prompt's tail (vLLM counts from the end of the prompt, the worker from the start of
the prompt's last block, up to L - 1 tokens earlier), keeps what was never committed out of the
prefix cache, and ends requests that cannot go on.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.diffusion_scheduler import (
    DiffusionAsyncScheduler,
    DiffusionScheduler,
    diffusion_canvas_width,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.worker.slots import Mark

logger = init_logger("vllm.dllm")

# Why a request is ended in the middle of its answer.
REASONS = {
    Mark.UNSOUND: "its logits are not finite (NaN or inf)",
    Mark.NO_TOKEN_LEFT: "its parameters leave no token to choose",
    Mark.NOT_TAKEN_UP: "its parameters could not be taken up, see the worker's log above",
}


class CommonRules(DiffusionScheduler):
    """What holds for canvases of either kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True
        self.block_length = self.num_spec_tokens
        # vLLM caches a request's pages when tokens arrive. The last canvas arrives without a
        # commit, so its keys and values are those of a denoise step. Allocation, which goes past
        # this method, caches what came before it.
        self.kv_cache_manager.cache_blocks = lambda request, num_computed_tokens: None

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """With pipeline stages, leave as many steps between two of a request as there are stages.

        What the last stage makes of a step reaches the others that many steps later. vLLM sees
        to it where a step decodes; a prompt's last chunk counts as well, because its tail goes
        back with it.
        """
        super()._update_after_schedule(scheduler_output)
        stages = self.parallel_config.pipeline_parallel_size
        if stages == 1:
            return
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.next_decode_eligible_step = self.current_step + stages

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """End requests that cannot go on: alone, with an error, and with the reason in the log.

        The sampler marks their canvases, and those that left without a commit, see `Mark`.
        """
        marks = model_runner_output.num_nans_in_logits or {}
        for request_id, mark in marks.items():
            if mark not in REASONS or request_id not in self.requests:
                continue
            logger.error(
                "dllm: request %s is ended with an error: %s", request_id, REASONS[Mark(mark)]
            )
            if mark == Mark.UNSOUND:
                # What it has cached would poison whoever shares its prefix.
                blocks = self.kv_cache_manager.get_block_ids(request_id)
                self.kv_cache_manager.evict_blocks({block for group in blocks for block in group})
            # vLLM's own list of requests to fail in this step.
            self.encoder_cache_mismatch_reqs.add(request_id)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, mark in marks.items():
            if mark == Mark.UNWRITTEN and request_id in self.requests:
                # Its next step begins with the canvas that has left, as if that were a prompt.
                self.requests[request_id].num_computed_tokens -= self.block_length
        return outputs


class CanvasScheduler(CommonRules):
    """The second rule alone: canvases that begin behind the prompt (DiffusionGemma)."""

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
    """The same with one step in flight."""


class BlockDiffusionScheduler(CommonRules):
    """The two rules, for synchronous scheduling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_length = self.max_model_len
        # vLLM clips a step at max_model_len - position, with a position that lies up to
        # L - 1 behind the worker's; `_mamba_block_aligned_split` has the exact rule.
        self.max_model_len += self.block_length

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
        """Number of tokens to schedule, given that vLLM would schedule ``num_new_tokens``.

        The name is vLLM's: its per-request hook for shortening a chunk was made for
        Mamba's state blocks. 0 lets the request wait for a later step.
        """
        length = self.block_length
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        end, known = start + num_new_tokens, request.num_tokens
        if start >= known:
            return self._canvas(start, num_new_tokens)
        # A prompt, or a canvas that has left without a commit and has the next one behind it.
        if end > known:
            return known - start + self._canvas(known, end - known)
        if end < known:
            end -= end % length
        return max(end - start, 0)

    def _canvas(self, start: int, tokens: int) -> int:
        """Tokens to schedule of a canvas, given how many the budget holds: L or 0.

        With a step in flight `start` assumes that it commits; the canvas behind it must fit into
        the context, or this step would run past the end of the block table.
        """
        length = self.block_length
        fits = start - start % length + length <= self.context_length
        return length if fits and tokens >= length else 0


class AsyncBlockDiffusionScheduler(BlockDiffusionScheduler, DiffusionAsyncScheduler):
    """The same with one step in flight."""


def make_scheduler(**kwargs: Any) -> DiffusionScheduler:
    """The scheduler for a configuration (vLLM resolves ``scheduler_cls`` to this).

    A function, because whether scheduling is asynchronous is settled only after the
    model's configuration hook has run.
    """
    vllm_config = kwargs["vllm_config"]
    asynchronous = vllm_config.scheduler_config.async_scheduling
    if vllm_config.model_config.architecture == "LLaDA2MoeModelLM":
        block = AsyncBlockDiffusionScheduler if asynchronous else BlockDiffusionScheduler
        return block(**kwargs)
    return (AsyncCanvasScheduler if asynchronous else CanvasScheduler)(**kwargs)
