"""The additions to vLLM's scheduler that all families share.

They keep pages that were never committed out of the prefix cache, and end requests that cannot
continue. The rules about canvases and prefill chunks belong to the families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.families.registry import family_of
from vllm_dllm.settings.resolution import ResolvedRequest
from vllm_dllm.vllm_seams.channels import Failure, PassFlags, decode_passes

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

    def add_request(self, request: Request) -> None:
        """Record the passes of a request whose steps somebody wants to know."""
        resolved = ResolvedRequest.received(request.sampling_params.extra_args)
        if resolved.step_details:
            if self.recorder is None:
                from vllm_dllm.tracing.recorder import Recorder

                settings = self.vllm_config.model_config.dllm.settings
                self.recorder = Recorder(settings.threshold_under_load)
            self.recorder.begin(request.request_id, resolved)
        super().add_request(request)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """With pipeline stages, space a request's steps by as many steps as there are stages.

        The result of a step in the last stage reaches the others that many steps later. vLLM takes
        this into account for decode steps only. The last chunk of a prompt has a result as well,
        because the worker goes back by the tail after it.
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
        """End each request that cannot continue, with an error for it alone and a log entry.

        The sampler reports why they cannot (`Failure`), and what the passes of the others did
        (`PassFlags`).
        """
        flags, failures = decode_passes(model_runner_output)
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
        for request_id, passed in flags.items():
            if passed & pending and request_id in self.requests:
                # Its next step begins with the canvas that has left, as if it were a prompt.
                self.requests[request_id].num_computed_tokens -= self.block_length
        return outputs


def make_scheduler(**kwargs: Any) -> DiffusionScheduler:
    """Make the scheduler for a configuration (vLLM resolves ``scheduler_cls`` to this).

    This is a function because vLLM decides whether scheduling is asynchronous only after the
    model's configuration hook has run. If statistics are disabled, nothing is counted.
    """
    vllm_config = kwargs["vllm_config"]
    scheduler = family_of(vllm_config).scheduler(vllm_config.scheduler_config.async_scheduling)
    if kwargs["log_stats"]:
        from vllm_dllm.families.counting import counting

        scheduler = counting(scheduler)
    return scheduler(**kwargs)
