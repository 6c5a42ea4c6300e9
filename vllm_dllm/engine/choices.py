"""What a request gets: its own options over the server's settings over the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_dllm.config import RequestOptions, parse_request_options
from vllm_dllm.engine.requests import SlotState


@dataclass(frozen=True)
class RequestDefaults:
    """What a request gets when it does not choose.

    Attributes:
        parameters: the algorithm's parameters.
        max_steps: cap on the denoise steps of a canvas.
        may_exceed_steps: a request may choose more steps than `max_steps`.
        eos_early_stop: finish a block at its first end-of-sequence token.
    """

    parameters: Mapping[str, float]
    max_steps: int
    may_exceed_steps: bool
    eos_early_stop: bool

    def configure(
        self, slots: SlotState, slot: int, sampling_params: Any, new: bool
    ) -> RequestOptions:
        """Write a request's choices into its slot; `new` is false when it comes back."""
        options = parse_request_options(sampling_params.extra_args)
        end_tokens: set[int] = set()
        if self.eos_early_stop:
            end_tokens.update(sampling_params.stop_token_ids or ())
            if sampling_params.eos_token_id is not None:
                end_tokens.add(sampling_params.eos_token_id)
        chosen = {**self.parameters, **options.parameters}
        if "temperature" in chosen:
            # It scales the model's own schedule: 1.0 as published, 0 greedy.
            chosen["temperature"] = sampling_params.temperature
        steps = options.max_steps or self.max_steps
        slots.configure(
            slot,
            max_steps=steps if self.may_exceed_steps else min(steps, self.max_steps),
            end_tokens=end_tokens,
            parameters=chosen,
            read_only=bool(options.read_only),
        )
        if new and options.seed_canvas is not None:
            slots.seed_canvas(slot, options.seed_canvas, options.pinned or ())
        return options
