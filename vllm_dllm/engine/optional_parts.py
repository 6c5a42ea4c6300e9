"""Features that only some requests use: constraints, row options, logprobs and records.

Each part is imported and created for the first request that asks for it. The slots' flags on the
host say whether a batch needs one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from vllm_dllm.engine.contracts import Batch, StepObserver
from vllm_dllm.engine.slots import SlotState

if TYPE_CHECKING:
    import torch

    from vllm_dllm.engine.constraints import Constraints
    from vllm_dllm.engine.load_threshold import LoadThreshold
    from vllm_dllm.engine.logprobs import LogprobReports
    from vllm_dllm.engine.records import PassRecorder
    from vllm_dllm.engine.row_options import RowOptionState
    from vllm_dllm.engine.two_block_window import TwoBlockWindow
    from vllm_dllm.settings.resolution import ResolvedDecoding, ResolvedRequest

# The parameters from which `RowOptions` is built, unless all of them are at their defaults.
ROW_PARAMETERS = (
    *("allowed_token_ids", "bad_words_token_ids", "logit_bias", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("top_k", "top_p", "min_p", "logprobs", "logprob_token_ids"),
)
DEFAULTS = SamplingParams()


class OptionalParts:
    """The optional parts of an engine's steps; most are made when they are first used."""

    def __init__(self, slots: SlotState, logprobs_mode: str, alone: bool = False) -> None:
        """`logprobs_mode` is vLLM's ``--logprobs-mode``; `alone` if there is only one rank."""
        self.slots = slots
        self.alone = alone
        self.logprobs_mode = logprobs_mode
        self.window: TwoBlockWindow | None = None  # where steps read two blocks
        self.under_load: LoadThreshold | None = None  # where thresholds follow the load

    @cached_property
    def constraints(self) -> Constraints:
        """The constraints of requests."""
        from vllm_dllm.engine.constraints import Constraints

        return Constraints(self.slots, self.alone)

    @cached_property
    def rows(self) -> RowOptionState:
        """The options that change or read whole rows of logits."""
        from vllm_dllm.engine.row_options import RowOptionState

        return RowOptionState(self.slots)

    @cached_property
    def logprobs(self) -> LogprobReports:
        """The logprobs of canvases that have not left yet."""
        from vllm_dllm.engine.logprobs import LogprobReports

        return LogprobReports(self.slots, self.rows, self.logprobs_mode)

    @cached_property
    def records(self) -> PassRecorder:
        """Records of passes over canvases."""
        from vllm_dllm.engine.records import PassRecorder

        return PassRecorder(self.slots, self)

    def enter(
        self,
        slot: int,
        params: Any,
        resolved: ResolvedRequest,
        choice: ResolvedDecoding,
        prompt_length: int,
        packed: bytes | None,
        output: Sequence[int],
    ) -> None:
        """Set up what the request entering ``slot`` asks for, and forget the previous request.

        `params` are vLLM's ``SamplingParams``, `packed` is the request's packed constraint, and
        `output` what it had output before it was preempted.
        """
        self.leave(slot)
        if packed is not None:
            self.constraints.enter(slot, packed, output, choice.blocks)
        if resolved.step_details:
            options = self.records.row_options(
                params, resolved, choice, prompt_length, packed is not None
            )
        elif any(getattr(params, name) != getattr(DEFAULTS, name) for name in ROW_PARAMETERS):
            from vllm_dllm.engine.row_options import RowOptions

            options = RowOptions.from_params(params, prompt_length, resolved.constrained)
        else:
            return
        if options is not None:
            self.rows.enter(slot, options)
            if options.reports:
                self.logprobs.enter(options)

    def leave(self, slot: int) -> None:
        """Forget the request in ``slot``."""
        for name in ("constraints", "rows", "logprobs"):
            if name in vars(self):  # it has been made
                getattr(self, name).leave(slot)

    def observers(self, flags: Mapping[str, bool]) -> Sequence[StepObserver]:
        """The observers of steps whose requests have these flags (`HOST_FLAGS`)."""
        observers: list[StepObserver] = []
        if flags["reports"]:
            observers.append(self.logprobs)
        if flags["records"]:
            observers.append(self.records)
        return observers

    def reported(self, batch: Batch, first: torch.Tensor) -> Any:
        """What the observers of a batch, prefills included, report with the tokens that leave.

        This is vLLM's ``LogprobsTensors``, or our `TracedLogprobs`, or None. `first` (int64
        ``[rows]``) is where those tokens begin in their canvas.
        """
        found = None
        if batch.flags["reports"]:
            found = self.logprobs.leaving(batch.slots, batch.on_host, first)
        return self.records.added_to(found, batch.on_host) if batch.flags["records"] else found
