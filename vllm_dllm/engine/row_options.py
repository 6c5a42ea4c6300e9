"""Options that change or read whole rows of logits: biases, filters and logprobs.

Biases are applied in vLLM's order: allowed ids, bias, minimum length, bans, penalties. Penalties
count only the tokens before the first unfinished block, so that the tokens of a block do not depend
on the order in which they are decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_dllm.engine.contracts import StepPlan
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import copy_into, to_device
from vllm_dllm.vllm_seams.channels import Failure

# The largest score, by the dtype of logits. It stays finite when divided by any temperature (at
# least 0.01).
MOST_SCORE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}


class RowWork(IntFlag):
    """The changes to a request's rows of logits that its options ask for, logprobs aside."""

    NONE = 0
    SHIFT = 1  # logit bias, allowed ids, banned ids
    MIN_TOKENS = 2
    PENALTIES = 4
    MIN_P = 8
    TOP_K = 16
    TOP_P = 32
    BIASES = SHIFT | MIN_TOKENS | PENALTIES  # at any temperature
    FILTERS = MIN_P | TOP_K | TOP_P  # only where tokens are drawn


@dataclass(frozen=True)
class RowOptions:
    """The options of a request that change or read whole rows of logits.

    The defaults change nothing. Fields are those of vLLM's ``SamplingParams`` unless described.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()  # only these ids may be chosen; empty for all
    banned: tuple[int, ...] = ()  # these ids may not be chosen
    min_tokens: int = 0  # `ends` may not be chosen before this many output tokens
    ends: tuple[int, ...] = ()  # ids that end the request; empty if `min_tokens` is 0
    presence: float = 0.0  # the penalties
    frequency: float = 0.0
    repetition: float = 1.0
    prompt_length: int = 0  # number of prompt tokens, after which the output begins
    logprobs: int | None = None
    # Ids to report in addition to the chosen one, in place of the likeliest.
    token_ids: tuple[int, ...] = ()
    # Whether records of the request's steps need the logprobs of chosen tokens.
    records: bool = False

    @classmethod
    def from_params(
        cls, params: Any, prompt_length: int, constrained: bool = False, records: bool = False
    ) -> RowOptions | None:
        """The options in vLLM's ``SamplingParams``, or None if a request has none of them.

        `constrained` restricts the choice to the ids whose logprobs are asked for.
        """
        token_ids = tuple(params.logprob_token_ids or ())
        allowed = tuple(params.allowed_token_ids or ())
        options = cls(
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            logit_bias=dict(params.logit_bias or {}),
            allowed=token_ids if constrained else allowed,
            banned=tuple(word[0] for word in params.bad_words_token_ids or () if len(word) == 1),
            min_tokens=params.min_tokens,
            ends=tuple(sorted(params.all_stop_token_ids)) if params.min_tokens else (),
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            logprobs=params.logprobs,
            token_ids=token_ids,
            records=records,
        )
        if options == cls():
            return None
        return replace(options, prompt_length=prompt_length)

    @cached_property
    def reports(self) -> bool:
        """Whether logprobs are reported, with the tokens or in records."""
        return self.returns or self.records

    @cached_property
    def returns(self) -> bool:
        """Whether logprobs are reported with the tokens."""
        return self.logprobs is not None or bool(self.token_ids)

    @cached_property
    def work(self) -> RowWork:
        """The work to be done on the request's rows."""
        asked = {
            RowWork.SHIFT: bool(self.logit_bias or self.allowed or self.banned),
            RowWork.MIN_TOKENS: bool(self.min_tokens and self.ends),
            RowWork.PENALTIES: (self.presence, self.frequency, self.repetition) != (0, 0, 1),
            RowWork.MIN_P: self.min_p > 0,
            RowWork.TOP_K: self.top_k > 0,
            RowWork.TOP_P: self.top_p < 1,
        }
        return RowWork(sum(work for work, is_asked in asked.items() if is_asked))

    @property
    def biases(self) -> bool:
        """Whether logits change before tokens are chosen or drawn, at any temperature."""
        return bool(self.work & RowWork.BIASES)

    def shift(self, vocabulary: int) -> np.ndarray:
        """The values that biases add to logits: float32 ``[vocabulary]``, -inf for excluded ids."""
        shift: np.ndarray = np.zeros(vocabulary, dtype=np.float32)
        if self.allowed:
            shift[:] = -np.inf
            shift[list(self.allowed)] = 0.0
        for token, bias in self.logit_bias.items():
            shift[token] += bias
        shift[list(self.banned)] = -np.inf
        return shift


# Options that change and read whole rows of logits in every way that takes memory.
COSTLY = RowOptions(
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    logit_bias={0: 1.0},
    min_tokens=1,
    ends=(0,),
    presence=0.5,
    frequency=0.5,
    repetition=1.1,
    logprobs=20,
)


class RowOptionState:
    """The options of the requests in all slots, and how they change the rows of a step.

    Everything is copied to the device when a request enters its slot, and a step only gathers.
    """

    COUNTS = ("prompt_length", "min_tokens", "top_k")
    SHARES = ("top_p", "min_p", "presence", "frequency", "repetition")

    def __init__(self, slots: SlotState) -> None:
        self.slots = slots
        self._vocabulary, self._device = slots.kind.vocabulary, slots.device
        count = len(slots.phase)
        self.by_slot: dict[int, RowOptions] = {}
        # On the host, the `RowWork` and `RowOptions.records` of each slot.
        self.work: np.ndarray = np.zeros(count, dtype=np.int64)
        self.records: np.ndarray = np.zeros(count, dtype=bool)
        # Parameters by their name in `RowOptions`; meaningless for slots without options.
        counts, shares = (count, len(self.COUNTS)), (count, len(self.SHARES))
        self.counts = torch.zeros(counts, dtype=torch.int64, device=self._device)
        self.shares = torch.zeros(shares, device=self._device)
        # By slot, only for requests that have them: float32 and bool, [vocabulary] each.
        self._shift: dict[int, torch.Tensor] = {}
        self._ends: dict[int, torch.Tensor] = {}

    def leave(self, slot: int) -> None:
        """Drop the options of the request in ``slot``, if it has any."""
        for kept in (self.by_slot, self._shift, self._ends):
            kept.pop(slot, None)
        self.work[slot] = RowWork.NONE
        self.records[slot] = self.slots.needs_rows[slot] = self.slots.reports[slot] = False

    def enter(self, slot: int, options: RowOptions) -> None:
        """Store the options of the request that enters ``slot``."""
        self.leave(slot)
        self.by_slot[slot] = options
        self.slots.needs_rows[slot] = True
        self.slots.reports[slot] = options.reports
        self.records[slot] = options.records
        self.work[slot] = work = options.work
        if not work:
            return
        # A k of the whole vocabulary keeps every token. So does a tiny share, whose logarithm is
        # finite.
        top_k = min(options.top_k or self._vocabulary, self._vocabulary)
        neutral = replace(options, top_k=top_k, min_p=max(options.min_p, 1e-30))
        for numbers, names in ((self.counts, self.COUNTS), (self.shares, self.SHARES)):
            values = torch.tensor([getattr(neutral, name) for name in names], dtype=numbers.dtype)
            copy_into(numbers[slot], values)
        if work & RowWork.SHIFT:
            self._shift[slot] = to_device(options.shift(self._vocabulary), self._device)
        if work & RowWork.MIN_TOKENS:
            is_end: np.ndarray = np.zeros(self._vocabulary, dtype=bool)
            # A tokenizer's end token may have an id outside the head.
            is_end[[end for end in options.ends if end < self._vocabulary]] = True
            self._ends[slot] = to_device(is_end, self._device)

    def in_batch(self, on_host: np.ndarray) -> list[tuple[int, int, RowOptions]]:
        """(index in the batch, slot, options) of the requests of a batch that have options."""
        rows = np.flatnonzero(self.slots.needs_rows[on_host]).tolist()
        return [(row, int(on_host[row]), self.by_slot[int(on_host[row])]) for row in rows]

    def apply_biases(self, logits: torch.Tensor, plan: StepPlan) -> None:
        """Bias the logits ``[n * L, vocabulary]`` of a batch, in place.

        For any parameters, the results are finite, or -inf for excluded tokens.
        """
        canvases = logits.view(-1, self.slots.length, logits.shape[1])
        asking = self._asking(plan, RowWork.BIASES)
        if asking is None:
            return
        index, slots, on_host, work = asking
        own = canvases if index is None else canvases.index_select(0, index)
        scores = own.float()  # the same tensor if it is float32 already
        if work & RowWork.SHIFT:
            none = torch.zeros(self._vocabulary, device=self._device)
            shift = torch.stack([self._shift.get(slot, none) for slot in on_host.tolist()])[:, None]
            scores.add_(shift).masked_fill_(shift == -torch.inf, -torch.inf)
        if work & RowWork.MIN_TOKENS:
            not_an_end = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
            ends = torch.stack([self._ends.get(slot, not_an_end) for slot in on_host.tolist()])
            start = self.slots.start.index_select(0, slots)
            before = start - self._number("prompt_length", slots)
            nth = before[:, None] + self.slots.position  # in the output, [n, L]
            too_early = nth < self._number("min_tokens", slots)[:, None]
            scores.masked_fill_(too_early[..., None] & ends[:, None], -torch.inf)
        ruled_out = scores == -torch.inf
        if work & RowWork.PENALTIES:
            self._penalise(scores, slots)
        most = MOST_SCORE[own.dtype]
        own.copy_(scores.clamp_(-most, most).masked_fill_(ruled_out, -torch.inf))
        self.slots.fail(slots, ruled_out.all(2).any(1), Failure.NO_TOKEN_LEFT)
        if index is not None:
            canvases.index_copy_(0, index, own)

    def _penalise(self, scores: torch.Tensor, slots: torch.Tensor) -> None:
        """Apply vLLM's penalties to scores ``[n, L, vocabulary]``, in place."""
        history = self.slots.history.index_select(0, slots)
        tokens = history.long().clamp_(0, self._vocabulary - 1)  # [n, positions]
        prompt_length = self._number("prompt_length", slots)[:, None]
        start = self.slots.start.index_select(0, slots)[:, None]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        before = position < torch.maximum(start, prompt_length)
        seen = torch.zeros((len(slots), self._vocabulary), device=scores.device)
        count = torch.zeros_like(seen)
        seen.scatter_add_(1, tokens, before.float())
        count.scatter_add_(1, tokens, (before & (position >= prompt_length)).float())
        if self.slots.kind.blocks > 1:
            place = self.slots.position
            finished = place < self.slots.finished_end(slots)[:, None]
            finished &= start + place >= prompt_length
            canvas = self.slots.tokens.index_select(0, slots).clamp_max(self._vocabulary - 1)
            for numbers in (seen, count):
                numbers.scatter_add_(1, canvas, finished.float())

        def number(name: str) -> torch.Tensor:
            return self._number(name, slots)[:, None]

        repetition = torch.where(seen > 0, number("repetition"), 1.0)[:, None]
        positive = scores > 0
        # Keep only one large temporary alive at a time.
        scores.div_(torch.where(positive, repetition, 1.0))
        scores.mul_(torch.where(positive, 1.0, repetition))
        scores.sub_((number("frequency") * count + number("presence") * (count > 0))[:, None])

    def filtered(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Return logits ``[n * L, vocabulary]`` in which tokens that filters exclude are -inf.

        If no request has a filter, the given logits are returned.
        """
        asking = self._asking(plan, RowWork.FILTERS)
        if asking is None:
            return logits
        index, slots, _, work = asking
        canvases = logits.view(-1, self.slots.length, logits.shape[1])
        own = logits if index is None else canvases.index_select(0, index).flatten(0, 1)

        def per_row(name: str) -> torch.Tensor:
            return self._number(name, slots).repeat_interleave(self.slots.length)

        if work & RowWork.MIN_P:
            floor = own.amax(-1) + per_row("min_p").log()
            own = own.masked_fill(own < floor[:, None], -torch.inf)
        k = per_row("top_k").int() if work & RowWork.TOP_K else None  # as vLLM's filter expects
        p = per_row("top_p") if work & RowWork.TOP_P else None
        if own is logits and (k is not None or p is not None):
            own = own.clone()  # vLLM's filters write
        own = apply_top_k_top_p(own, k, p)
        if index is None:
            return own
        own = own.view(-1, self.slots.length, own.shape[1])
        return canvases.index_copy(0, index, own).flatten(0, 1)

    def _asking(
        self, plan: StepPlan, work: RowWork
    ) -> tuple[torch.Tensor | None, torch.Tensor, np.ndarray, RowWork] | None:
        """The canvases of a batch whose requests ask for any of this work; None if there are none.

        These are their positions in the batch (int64 ``[m]``, None for the whole batch), their
        slots on the device and on the host, and all the work that they ask for together.
        """
        of_each = self.work[plan.on_host]
        asks = of_each & work > 0
        if not asks.any():
            return None
        together = RowWork(int(np.bitwise_or.reduce(of_each[asks])))
        if asks.all():
            return None, plan.slots, plan.on_host, together
        index = to_device(np.flatnonzero(asks), plan.slots.device)
        return index, plan.slots.index_select(0, index), plan.on_host[asks], together

    def _number(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """The values ``[n]`` of a parameter for ``slots`` (int64 ``[n]``)."""
        is_count = name in self.COUNTS
        numbers, names = (self.counts, self.COUNTS) if is_count else (self.shares, self.SHARES)
        return numbers[:, names.index(name)].index_select(0, slots)
