"""Channels between our worker, scheduler and front end, in fields of vLLM's messages.

vLLM has no place for a plugin's data on the way back from the worker, so each channel borrows a
field. Its encoder and its decoder are here, and nothing else reads or writes that field. (To the
worker, data travels in a request's ``extra_args``, which vLLM has for plugins, and in
``dllm_unclean`` of vLLM's ``SchedulerOutput``: which requests may have spoiled their pages.)

    from        to          what                        borrowed field
    worker      scheduler   how each pass went          ``num_nans`` of the sampler's output
    worker      scheduler   records of a step's passes  its ``logprobs_tensors``
    scheduler   front end   records of a request        ``new_sampling_mask``, which stays empty
                                                        because our sampler returns no masks
    scheduler   front end   counts by algorithm         ``num_kv_fetch_reqs_by_stage``, integers by
                                                        name in the scheduler's statistics

Those of records are in `records`, because they exist only while a request is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag
from typing import Any

import torch

# (algorithm, counter) -> by how much it grows.
Counts = Mapping[tuple[str, str], int]
_PREFIX = "dllm"


class PassFlags(IntFlag):
    """The outcome of a pass over a sound canvas."""

    KV_PENDING = 1  # the canvas has left, but its keys and values are still to be written
    WAITED = 2  # the decoding algorithm did not run; set for a commit only if others may wait
    COMMITTED = 4  # the pass was the canvas' commit
    LEFT = 8  # the canvas has left, and the next one begins


# The number of passes over the canvas before this one, in the same step, has the bits above those.
EARLIER = len(PassFlags)


class Failure(IntEnum):
    """Why a request ends with an error."""

    NONE = 0
    UNSOUND = 1  # the canvas was read with NaN or infinities
    NO_TOKEN_LEFT = 2  # the request's own parameters rule out every token of a position
    NOT_TAKEN_UP = 3  # the request's slot could not be set up
    UNREAD_TOKEN = 4  # the algorithm chose a token whose logprob is not known


def encode_passes(sound: torch.Tensor, flags: torch.Tensor, failure: torch.Tensor) -> torch.Tensor:
    """The ``num_nans`` of a step, int32 ``[n]``.

    `sound` canvases (bool ``[n]``) have minus their `PassFlags`, and the others their `Failure`.
    """
    return torch.where(sound, -flags, failure).int()


def with_earlier_passes(numbers: torch.Tensor, earlier: torch.Tensor | int) -> torch.Tensor:
    """`encode_passes` of canvases that had `earlier` passes in this step, int32 ``[n]`` all."""
    return torch.where(numbers <= 0, numbers - earlier * (1 << EARLIER), numbers)


def decode_passes(output: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The `PassFlags` of a step's sound canvases and the failures of the others, by request id."""
    numbers = output.num_nans_in_logits or {}
    flags = {request_id: -number for request_id, number in numbers.items() if number <= 0}
    return flags, {request_id: number for request_id, number in numbers.items() if number > 0}


def put_counts(stats: Any, counts: Counts) -> None:
    """Send counts with vLLM's ``SchedulerStats``."""
    stats.num_kv_fetch_reqs_by_stage |= {
        f"{_PREFIX}:{counter}:{algorithm}": number
        for (algorithm, counter), number in counts.items()
    }


def take_counts(stats: Any) -> Counts:
    """Remove and return what `put_counts` was given."""
    numbers, found = stats.num_kv_fetch_reqs_by_stage, {}
    for name in [name for name in numbers if name.startswith(f"{_PREFIX}:")]:
        _, counter, algorithm = name.split(":", 2)
        found[algorithm, counter] = numbers.pop(name)
    return found
