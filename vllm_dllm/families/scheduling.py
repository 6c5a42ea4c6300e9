"""The additions to vLLM's scheduler that all families share.

They keep pages that were never committed out of the prefix cache, end requests that cannot
continue, and count passes, tokens and requests by decoding algorithm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.families.registry import family_of
from vllm_dllm.settings.resolution import ResolvedRequest
from vllm_dllm.vllm_seams.channels import EARLIER, Failure, PassFlags, decode_passes, put_counts

if TYPE_CHECKING:
    from vllm_dllm.tracing.recorder import Recorder

logger = init_logger("vllm.dllm")

SCHEDULER = "vllm_dllm.families.scheduling.make_scheduler"

# The reasons for ending a request in the middle of its answer, for the log.
REASONS = {
    Failure.UNSOUND: "its logits are not finite (NaN or inf)",
    Failure.NO_TOKEN_LEFT: "its parameters leave no token to choose",
    Failure.NOT_TAKEN_UP: "its parameters could not be processed; see the worker's log above",
    Failure.UNREAD_TOKEN: (
        "it asks for logprobs, and its decoding algorithm chose a token whose logprob was not read"
    ),
}


class CommonRules(DiffusionScheduler):
    """The rules that hold for canvases of every family."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True
        served = self.vllm_config.model_config.dllm
        self.block_length = served.length
        self.canvas_length = served.length * served.settings.blocks
        # vLLM caches a request's pages when tokens arrive. The last canvas arrives without a
        # commit, so its keys and values are those of a denoise step. Allocation bypasses this
        # method and caches what came before that canvas.
        self.kv_cache_manager.cache_blocks = lambda request, num_computed_tokens: None
        self.recorder: Recorder | None = None  # made for the first request with a trace
        self.unclean: set[str] = set()  # requests that may have spoiled their pages
        self.algorithm_of: dict[str, str] = {}
        self.flags: dict[str, int] = {}  # of the passes of a step
        # (algorithm, counter) -> its growth, kept until the next statistics are made, because an
        # aborted request may end between two steps.
        self.counts: Counter[tuple[str, str]] = Counter()

    def add_request(self, request: Request) -> None:
        """Record the passes of a request whose steps somebody wants to know."""
        resolved = ResolvedRequest.received(request.sampling_params.extra_args)
        self.algorithm_of[request.request_id] = resolved.algorithm
        if resolved.step_details:
            if self.recorder is None:
                from vllm_dllm.tracing.recorder import Recorder

                settings = self.vllm_config.model_config.dllm.settings
                self.recorder = Recorder(settings.threshold_under_load)
            self.recorder.begin(request.request_id, resolved)
        super().add_request(request)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """With pipeline stages, space a request's steps by as many steps as there are stages.

        vLLM does so for decode steps only. The last chunk of a prompt has a result as well, because
        the worker goes back by the tail after it.
        """
        super()._update_after_schedule(scheduler_output)
        scheduler_output.dllm_unclean, self.unclean = self.unclean, set()
        stages = self.parallel_config.pipeline_parallel_size
        if stages == 1:
            return
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.next_decode_eligible_step = self.current_step + stages

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """The number of tokens to schedule where vLLM would schedule ``num_new_tokens``; 0 waits.

        vLLM calls it for every request, and has it for Mamba's state blocks.
        """
        elsewhere = num_new_local_computed_tokens + num_external_computed_tokens
        return self.tokens_to_schedule(
            request, request.num_computed_tokens + elsewhere, num_new_tokens
        )

    @abstractmethod
    def tokens_to_schedule(self, request: Request, start: int, tokens: int) -> int:
        """How many of a request's next tokens, from position `start` on, to schedule."""

    @staticmethod
    def _whole_canvas(request: Request, width: int, left: int, tokens: int) -> int:
        """The tokens of a canvas if the budget holds them all, else 0.

        The end of the context may cut the last canvas to the `left` tokens before it. With a step
        in flight such a canvas waits: vLLM assumes that the step commits, and if it does not, the
        canvas has not moved.
        """
        if left < width and request.num_output_placeholders:
            return 0
        whole = min(width, left)
        return whole if whole > 0 and tokens >= whole else 0

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Requests that are aborted, or end with an error, may have written NaN."""
        before = set(self.finished_req_ids)
        found = super().finish_requests(*args, **kwargs)
        self.unclean |= self.finished_req_ids - before
        return found

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Forget pages that vLLM has cached for a step that it drops, if the request was scheduled.

        A step in flight, or tokens that leave before their commit, count as computed, too.
        """
        manager = self.kv_cache_manager
        final = max(0, request.num_computed_tokens - 2 * self.canvas_length)
        by_group = manager.get_block_ids(request.request_id)
        for group, ids in zip(manager.coordinator.single_type_managers, by_group, strict=True):
            manager.evict_blocks(set(ids[final // group.block_size :]))
        super()._preempt_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """End each request that cannot continue, with an error for it alone and a log entry."""
        self.flags, failures = decode_passes(model_runner_output)
        for request_id, mark in failures.items():
            if request_id not in self.requests:
                continue
            logger.error(
                "dllm: request %s ends with an error: %s", request_id, REASONS[Failure(mark)]
            )
            if mark == Failure.UNSOUND:
                # The pages it has cached would spoil every request that shares its prefix.
                blocks = self.kv_cache_manager.get_block_ids(request_id)
                self.kv_cache_manager.evict_blocks({block for group in blocks for block in group})
            # vLLM's own list of requests to fail in this step.
            self.encoder_cache_mismatch_reqs.add(request_id)
        if self.recorder is not None:
            self.recorder.note(model_runner_output, len(scheduler_output.num_scheduled_tokens))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.recorder is not None:
            leaving = (output for each in outputs.values() for output in each.outputs)
            self.recorder.attach(leaving, self.requests.keys())
        pending = int(PassFlags.KV_PENDING)  # `&` of two integers is faster
        for request_id, passed in self.flags.items():
            if passed & pending and request_id in self.requests:
                # Its next step begins with the canvas that has left, as if it were a prompt.
                self.requests[request_id].num_computed_tokens -= self.block_length
        return outputs

    def make_spec_decoding_stats(
        self, stats: Any, *, num_accepted_tokens: int, request_id: str, **kwargs: Any
    ) -> Any:
        """Count the passes over a canvas in a step, for which vLLM calls this once."""
        algorithm = self.algorithm_of[request_id]
        # In a pass that failed, the algorithm did run.
        flags = self.flags.get(request_id, 0)
        earlier = flags >> EARLIER
        self.counts[algorithm, "denoising_steps"] += earlier
        if flags & PassFlags.COMMITTED:
            self.counts[algorithm, "commit_passes"] += 1
        elif flags & PassFlags.WAITED:
            self.counts[algorithm, "waiting_passes"] += 1
        else:
            self.counts[algorithm, "denoising_steps"] += 1
        if flags & PassFlags.LEFT:
            self.counts[algorithm, "blocks"] += 1
        self.counts[algorithm, "committed_tokens"] += num_accepted_tokens
        for accepted in (*[0] * earlier, num_accepted_tokens):
            stats = super().make_spec_decoding_stats(
                stats, num_accepted_tokens=accepted, request_id=request_id, **kwargs
            )
        return stats

    def _update_request_with_output(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Count the tokens of an answer, which ends within a block."""
        tokens, stopped = super()._update_request_with_output(request, *args, **kwargs)
        algorithm = self.algorithm_of[request.request_id]
        self.counts[algorithm, "generation_tokens"] += len(tokens)
        return tokens, stopped

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.counts[self.algorithm_of.pop(request.request_id), "finished_requests"] += 1
        return super()._free_request(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Add the counts since the last call to vLLM's statistics."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            put_counts(stats, self.counts)
            self.counts.clear()
        return stats


def make_scheduler(**kwargs: Any) -> DiffusionScheduler:
    """Make the scheduler for a configuration (vLLM resolves ``scheduler_cls`` to this).

    vLLM decides whether scheduling is asynchronous after the model's configuration hook has run.
    """
    vllm_config = kwargs["vllm_config"]
    scheduler = family_of(vllm_config).scheduler()
    if vllm_config.scheduler_config.async_scheduling:
        scheduler = type(f"Async{scheduler.__name__}", (scheduler, DiffusionAsyncScheduler), {})
    return scheduler(**kwargs)
