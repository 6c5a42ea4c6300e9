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
from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.vllm_seams.channels import Failure


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

# What the steps of a batch share: its changes but for `early` and `counts`, and the slots that
# these are of (int64, None if there are none).
Vectors = tuple[RowChanges, torch.Tensor | None, torch.Tensor | None]


class RowOptionState:
    """The options of the requests in all slots, and how they change the rows of a step.

    Everything is copied to the device when a request enters its slot, and a step only gathers.
    """

    COUNTS = ("prompt_length", "min_tokens", "top_k")
    SHARES = ("repetition", "frequency", "presence", "top_p", "min_p")

    def __init__(self, slots: SlotState) -> None:
        self.slots = slots
        self._vocabulary, self._device = slots.kind.vocabulary, slots.device
        count = len(slots.phase)
        self.by_slot: dict[int, RowOptions] = {}
        # On the host, the `RowWork` and `RowOptions.records` of each slot.
        self.work: np.ndarray = np.zeros(count, dtype=np.int64)
        self.records: np.ndarray = np.zeros(count, dtype=bool)
        # Parameters by their name in `RowOptions`; those of slots without options filter nothing.
        self.counts = torch.zeros((count, 3), dtype=torch.int64, device=self._device)
        self.shares = torch.zeros((count, 5), device=self._device)
        self._set(slice(None), RowOptions())
        # By slot, only for requests that have them: float32 and bool, [vocabulary] each.
        self._shift: dict[int, torch.Tensor] = {}
        self._ends: dict[int, torch.Tensor] = {}
        self._vectors: tuple[bytes, Vectors] | None = None  # those of the last batch, and its slots

    def _set(self, slot: int | slice, options: RowOptions) -> None:
        """Set the parameters of a slot."""
        # A k of the whole vocabulary keeps every token.
        top_k = min(options.top_k or self._vocabulary, self._vocabulary)
        known = replace(options, top_k=top_k)
        for numbers, names in ((self.counts, self.COUNTS), (self.shares, self.SHARES)):
            values = torch.tensor([getattr(known, name) for name in names], dtype=numbers.dtype)
            copy_into(numbers[slot], values)

    def leave(self, slot: int) -> None:
        """Drop the options of the request in ``slot``, if it has any."""
        if self.by_slot.pop(slot, None) is None:
            return
        self._shift.pop(slot, None)
        self._ends.pop(slot, None)
        self._vectors = None
        if self.work[slot] & RowWork.FILTERS:
            self._set(slot, RowOptions())
        self.work[slot] = RowWork.NONE
        self.records[slot] = self.slots.needs_rows[slot] = self.slots.reports[slot] = False

    def enter(self, slot: int, options: RowOptions) -> None:
        """Store the options of the request that enters ``slot``.

        It fails if they leave it without a token, be it at early positions only: its first canvas
        has these.
        """
        self.leave(slot)
        self.by_slot[slot] = options
        self._vectors = None
        self.slots.needs_rows[slot] = True
        self.slots.reports[slot] = options.reports
        self.records[slot] = options.records
        self.work[slot] = work = options.work
        if not work:
            return
        self._set(slot, options)
        allowed: np.ndarray = np.ones(self._vocabulary, dtype=bool)
        if work & RowWork.SHIFT:
            shift = options.shift(self._vocabulary)
            allowed = shift > -np.inf
            self._shift[slot] = to_device(shift, self._device)
        if work & RowWork.MIN_TOKENS:
            is_end: np.ndarray = np.zeros(self._vocabulary, dtype=bool)
            # A tokenizer's end token may have an id outside the head.
            is_end[[end for end in options.ends if end < self._vocabulary]] = True
            self._ends[slot] = to_device(is_end, self._device)
            allowed = allowed & ~is_end
        if not allowed.any():
            self.slots.failure[slot].fill_(int(Failure.NO_TOKEN_LEFT))

    def changes(self, plan: StepPlan) -> RowChanges | None:
        """The biases of a batch; None if no request has any."""
        if not (self.work[plan.on_host] & RowWork.BIASES).any():
            return None
        key = plan.on_host.tobytes()
        if self._vectors is None or self._vectors[0] != key:
            self._vectors = key, self._vectors_of(plan.on_host)
        shared, delayed, penalised = self._vectors[1]
        if delayed is not None:
            shared = replace(shared, early=self._early(delayed))
        if penalised is not None:
            penalties = self.shares[:, :3].index_select(0, penalised)
            shared = replace(shared, counts=self._counts(penalised), penalties=penalties)
        return shared

    def _vectors_of(self, on_host: np.ndarray) -> Vectors:
        """What the biases of these slots have in common in all steps."""
        work, device = self.work[on_host], self._device
        index: np.ndarray = np.full((len(on_host), 4), -1, dtype=np.int32)
        slots = []
        for column, kind in enumerate((RowWork.SHIFT, RowWork.MIN_TOKENS, RowWork.PENALTIES)):
            where = np.flatnonzero(work & kind)
            index[where, column] = np.arange(len(where))
            slots.append(on_host[where])
        shift = [self._shift[slot] for slot in slots[0].tolist()]
        ends = [self._ends[slot] for slot in slots[1].tolist()]
        delayed, penalised = (to_device(s, device) if len(s) else None for s in slots[1:])
        # What no canvas has is never read.
        none = RowChanges.none(len(on_host), device)
        changes = replace(none, on_host=torch.from_numpy(index), index=to_device(index, device))
        if shift:
            changes = replace(changes, shift=torch.stack(shift))
        if ends:
            changes = replace(changes, ends=torch.stack(ends))
        return changes, delayed, penalised

    def _early(self, slots: torch.Tensor) -> torch.Tensor:
        """Positions before `min_tokens`, bool ``[n, L]``, of ``slots`` (int64 ``[n]``)."""
        numbers = self.counts.index_select(0, slots)
        first = self.slots.start.index_select(0, slots) - numbers[:, 0]  # in the output
        return first[:, None] + self.slots.position < numbers[:, 1:2]

    def _counts(self, slots: torch.Tensor) -> torch.Tensor:
        """How often each token was seen, and how often in the output: int32 ``[n, 2, ids]``."""
        history = self.slots.history.index_select(0, slots)
        tokens = history.long().clamp_(0, self._vocabulary - 1)  # [n, positions]
        prompt_length = self._number("prompt_length", slots)[:, None]
        start = self.slots.start.index_select(0, slots)[:, None]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        before = position < torch.maximum(start, prompt_length)
        shape = len(slots), 2, self._vocabulary
        counts = torch.zeros(shape, dtype=torch.int32, device=start.device)
        seen, output = counts.unbind(1)
        seen.scatter_add_(1, tokens, before.int())
        output.scatter_add_(1, tokens, (before & (position >= prompt_length)).int())
        if self.slots.kind.blocks > 1:
            place = self.slots.position
            finished = place < self.slots.finished_end(slots)[:, None]
            finished &= start + place >= prompt_length
            canvas = self.slots.tokens.index_select(0, slots).clamp_max(self._vocabulary - 1)
            for numbers in (seen, output):
                numbers.scatter_add_(1, canvas, finished.int())
        return counts

    def filters(self, plan: StepPlan) -> tuple[torch.Tensor, ...] | None:
        """The filters of the canvases of a batch, ``[n]`` each; None if no request has any.

        These are `min_p` (float32), `top_k` (int64) and `top_p` (float32), in the order in which
        they apply.
        """
        if not (self.work[plan.on_host] & RowWork.FILTERS).any():
            return None
        return tuple(self._number(name, plan.slots) for name in ("min_p", "top_k", "top_p"))

    def filtered(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Return logits ``[n * L, vocabulary]`` in which tokens that filters exclude are -inf.

        If no request has a filter, the given logits are returned.
        """
        of_each = self.work[plan.on_host] & RowWork.FILTERS
        if not of_each.any():
            return logits
        every = logits.unflatten(0, (len(of_each), -1))
        canvases, slots, index = every, plan.slots, None
        if not of_each.all():
            index = to_device(np.flatnonzero(of_each), slots.device)
            canvases, slots = canvases.index_select(0, index), slots.index_select(0, index)
        own, work = canvases.flatten(0, 1), int(np.bitwise_or.reduce(of_each))

        def per_row(name: str) -> torch.Tensor:
            return self._number(name, slots).repeat_interleave(self.slots.length)

        if work & RowWork.MIN_P:
            floor = own.amax(-1) + per_row("min_p").log()
            own = own.masked_fill(own < floor[:, None], -torch.inf)
        k = per_row("top_k").int() if work & RowWork.TOP_K else None  # as vLLM's filter expects
        p = per_row("top_p") if work & RowWork.TOP_P else None
        if index is None and not work & RowWork.MIN_P:
            own = own.clone()  # vLLM's filters write
        own = apply_top_k_top_p(own, k, p)
        if index is None:
            return own
        return every.index_copy(0, index, own.view_as(canvases)).flatten(0, 1)

    def _number(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """The values ``[n]`` of a parameter for ``slots`` (int64 ``[n]``)."""
        is_count = name in self.COUNTS
        numbers, names = (self.counts, self.COUNTS) if is_count else (self.shares, self.SHARES)
        return numbers[:, names.index(name)].index_select(0, slots)
