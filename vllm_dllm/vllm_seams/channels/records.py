"""The channels for records of passes: from the worker to the scheduler, and on to the front end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm_dllm.vllm_seams.channels import PassFlags

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

# How the probabilities of a record mark positions that the pass did not decide, and positions that
# the request gave (its prompt's tail, pinned positions).
UNDECIDED, GIVEN = -1.0, -2.0
# The token of a position that the canvas does not have.
ABSENT = -1


@dataclass
class StepRecords:
    """The records of a step: m passes over canvases of at most L positions, see `Record`."""

    request_indices: list[int]  # in the batch
    headers: Any  # int32 ``[3, m]``: starts, steps and flags
    tokens: Any  # int32 ``[m, L]``
    scores: Any  # float32 ``[2, m, L]``: logprobs and probabilities

    def converted(self, convert: Callable[[Any], Any]) -> StepRecords:
        """The same with each tensor or array converted."""
        arrays = map(convert, (self.headers, self.tokens, self.scores))
        return StepRecords(self.request_indices, *arrays)


@dataclass
class TracedLogprobs:
    """The sampler's ``logprobs_tensors``: its logprobs, together with the step's records.

    It has the two methods of ``LogprobsTensors`` that vLLM's worker calls.
    """

    logprobs: LogprobsTensors | None
    records: StepRecords

    def to_cpu_nonblocking(self) -> TracedLogprobs:
        """A copy on the host, which is complete once vLLM has waited for it."""
        own = None if self.logprobs is None else self.logprobs.to_cpu_nonblocking()
        return TracedLogprobs(
            own, self.records.converted(lambda each: each.to("cpu", non_blocking=True))
        )

    def tolists(self) -> LogprobsLists:
        """An envelope, which `take_step_records` opens; it has the four items vLLM expects."""
        from vllm.v1.outputs import LogprobsLists

        own = None if self.logprobs is None else self.logprobs.tolists()
        nothing: Any = None
        content: Any = (own, self.records.converted(torch.Tensor.numpy))
        return LogprobsLists(nothing, nothing, nothing, content)


def take_step_records(output: Any) -> StepRecords | None:
    """Take a step's records, numpy arrays, off vLLM's output, which keeps its plain logprobs."""
    logprobs = output.logprobs
    if logprobs is None or logprobs.logprobs is not None:
        return None
    output.logprobs, records = logprobs.cu_num_generated_tokens
    return records


class Record(NamedTuple):
    """One pass over a canvas."""

    engine_step: int  # how many the engine has finished since its first traced request
    milliseconds: int  # when the step's result arrived, since that request
    start: int  # the canvas' first position, counted from the prompt's beginning
    step: int  # how many denoise steps the canvas had taken before
    flags: PassFlags  # what the pass did
    tokens: np.ndarray  # int32 ``[width]``, the canvas after the pass
    logprobs: np.ndarray  # float32 ``[width]``, of the tokens that this pass decided
    probabilities: np.ndarray  # float32 ``[width]``; `UNDECIDED` or `GIVEN` where it decided none
    threshold: float | None = None  # of the step, if it follows the load; sent as millionths

    @property
    def denoised(self) -> bool:
        """Whether the decoding algorithm ran."""
        return not self.flags & (PassFlags.COMMITTED | PassFlags.WAITED)


_NUMBERS = 6  # the fields of a record that are numbers
_NO_THRESHOLD = -1


def put_records(output: Any, details: int, records: Iterable[Record]) -> None:
    """Send a request's `StepDetails` and its records, at least one, with vLLM's output.

    Arrays of records have the length L, with `ABSENT` tokens at the end.
    """
    from vllm.v1.outputs import SamplingMaskLists

    *numbers, tokens, logprobs, probabilities, thresholds = zip(*records, strict=True)
    numbers.append([_NO_THRESHOLD if it is None else round(1e6 * it) for it in thresholds])
    flat = [int(number) for record in zip(*numbers, strict=True) for number in record]
    scores = np.stack((np.stack(logprobs), np.stack(probabilities)))
    output.new_sampling_mask = SamplingMaskLists(np.stack(tokens), scores, [details, *flat])


def take_records(output: Any) -> tuple[int, list[Record]] | None:
    """Return the arguments of `put_records`, cut to the canvas' width, or None without records."""
    sent = output.new_sampling_mask
    if sent is None or sent.cu_num_generated_tokens is None:  # a mask, for a model of vLLM's
        return None
    output.new_sampling_mask = None
    all_tokens, scores, (details, *flat) = sent
    found = []
    for row, first in enumerate(range(0, len(flat), _NUMBERS)):
        engine_step, milliseconds, start, step, flags, millionths = flat[first : first + _NUMBERS]
        tokens, logprobs, probabilities = all_tokens[row], scores[0, row], scores[1, row]
        width = int((tokens != ABSENT).sum())
        found.append(
            Record(
                *(engine_step, milliseconds, start, step, PassFlags(flags)),
                *(tokens[:width], logprobs[:width], probabilities[:width]),
                None if millionths == _NO_THRESHOLD else millionths / 1e6,
            )
        )
    return details, found
