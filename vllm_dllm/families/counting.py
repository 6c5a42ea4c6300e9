"""A scheduler that counts passes, tokens and requests by decoding algorithm.

Like vLLM, it counts only passes whose result is used by a request. With a step in flight, a pass
over a request that has just ended is not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.settings.resolution import ResolvedRequest
from vllm_dllm.vllm_seams.channels import PassFlags, decode_passes
from vllm_dllm.vllm_seams.channels.counts import put_counts


class CountingRules(DiffusionScheduler):
    """The rules of a scheduler that counts; `counting` puts them in front of a family's rules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._algorithm_of: dict[str, str] = {}
        self._flags: dict[str, int] = {}
        # (algorithm, counter) -> its growth, kept until the next statistics are made, because an
        # aborted request may end between two steps.
        self._counts: Counter[tuple[str, str]] = Counter()

    def add_request(self, request: Request) -> None:
        """Note the algorithm of a request that begins."""
        self._algorithm_of[request.request_id] = ResolvedRequest.received(
            request.sampling_params.extra_args
        ).algorithm
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Count the step; the methods that vLLM calls meanwhile read what its passes did."""
        self._flags, _ = decode_passes(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self, *args: Any, num_accepted_tokens: int, request_id: str, **kwargs: Any
    ) -> Any:
        """Count a pass over a canvas, for which vLLM calls this once."""
        algorithm = self._algorithm_of[request_id]
        # In a pass that failed, the algorithm did run.
        flags = self._flags.get(request_id, 0)
        if flags & PassFlags.COMMITTED:
            self._counts[algorithm, "commit_passes"] += 1
        elif flags & PassFlags.WAITED:
            self._counts[algorithm, "waiting_passes"] += 1
        else:
            self._counts[algorithm, "denoising_steps"] += 1
        if flags & PassFlags.LEFT:
            self._counts[algorithm, "blocks"] += 1
        self._counts[algorithm, "committed_tokens"] += num_accepted_tokens
        return super().make_spec_decoding_stats(
            *args, num_accepted_tokens=num_accepted_tokens, request_id=request_id, **kwargs
        )

    def _update_request_with_output(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Count the tokens of an answer, which ends within a block."""
        tokens, stopped = super()._update_request_with_output(request, *args, **kwargs)
        algorithm = self._algorithm_of[request.request_id]
        self._counts[algorithm, "generation_tokens"] += len(tokens)
        return tokens, stopped

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Count a request that ends."""
        self._counts[self._algorithm_of.pop(request.request_id), "finished_requests"] += 1
        return super()._free_request(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Add the counts since the last call to vLLM's statistics."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            put_counts(stats, self._counts)
            self._counts.clear()
        return stats


def counting(scheduler: type[DiffusionScheduler]) -> type[DiffusionScheduler]:
    """A class that schedules as `scheduler` does, and counts."""
    return type(f"Counting{scheduler.__name__}", (CountingRules, scheduler), {})
