"""The options of a request that need whole rows of logits: biases, filters and logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_dllm.engine.to_device import to_device


class RowWork(IntFlag):
    """What the options of a request do to its rows of logits, beside reporting logprobs."""

    NONE = 0
    SHIFT = 1  # logit bias, allowed ids, banned ids
    MIN_TOKENS = 2
    PENALTIES = 4
    MIN_P = 8
    TOP_K = 16
    TOP_P = 32
    BIASES = SHIFT | MIN_TOKENS | PENALTIES  # at any temperature
    FILTERS = MIN_P | TOP_K | TOP_P  # where tokens are drawn


@dataclass(frozen=True)
class RowOptions:
    """The options of a request that change or read whole rows of logits.

    Attributes:
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens up to this total probability; 1 keeps all.
        min_p: keep tokens with at least this share of the likeliest token's probability; 0 keeps
            all.
        logit_bias: what to add to logits, by token id.
        allowed: only these ids may be chosen; empty for all.
        banned: these ids may not be chosen.
        min_tokens: `ends` may not be chosen before this many output tokens.
        ends: ids that end the request; empty where `min_tokens` is 0.
        presence: subtracted from the logit of every token that the output has.
        frequency: subtracted from the logit of a token once for each time that the output has it.
        repetition: divides the positive and multiplies the negative logits of tokens in prompt or
            output.
        prompt_length: number of prompt tokens, behind which the output begins.
        logprobs: how many of the likeliest tokens to report next to the chosen one; None for no
            report, -1 for the whole vocabulary.
        token_ids: ids to report next to the chosen one, in place of the likeliest.
        records: logprobs of chosen tokens are needed for records of the request's steps.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt_length: int = 0
    logprobs: int | None = None
    token_ids: tuple[int, ...] = ()
    records: bool = False

    @classmethod
    def of(
        cls, params: Any, prompt_length: int, constrained: bool = False, records: bool = False
    ) -> RowOptions | None:
        """The options in vLLM's ``SamplingParams``, or None where a request has none of them.

        `constrained` restricts the choice to the ids whose logprobs are asked for; `records` is as
        in the attributes.
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
        """What is to be done to the request's rows."""
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

    def shift(self, vocabulary: int, device: torch.device) -> torch.Tensor:
        """What biases add to the logits: float32 ``[vocabulary]``, -inf for ids ruled out."""
        shift = torch.zeros(vocabulary, device=device)
        if self.allowed:
            shift.fill_(-torch.inf).index_fill_(0, _ids(self.allowed, device), 0.0)
        if self.logit_bias:
            amount: np.ndarray = np.fromiter(self.logit_bias.values(), dtype=np.float32)
            shift.index_add_(0, _ids(list(self.logit_bias), device), to_device(amount, device))
        if self.banned:
            shift.index_fill_(0, _ids(self.banned, device), -torch.inf)
        return shift


def _ids(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


class RowOptionTensors:
    """What a step reads of the options of all slots.

    Everything is copied to the device when a request enters its slot, and a step only gathers.

    Attributes:
        work: on the host, int ``[slots]``, the `RowWork` of each slot.
        numbers: parameters on the device by their name in `RowOptions`, ``[slots]`` each. Those of
            slots that have no options are meaningless.
    """

    # Dtypes of the numbers. vLLM's filters expect int32.
    DTYPES: Mapping[str, torch.dtype] = {
        **dict.fromkeys(("prompt_length", "min_tokens"), torch.int64),
        "top_k": torch.int32,
        **dict.fromkeys(("top_p", "min_p", "presence", "frequency", "repetition"), torch.float32),
    }

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.work: np.ndarray = np.zeros(slots, dtype=np.int64)
        self.numbers = {
            name: torch.zeros(slots, dtype=dtype, device=device)
            for name, dtype in self.DTYPES.items()
        }
        self._vocabulary = vocabulary
        self._device = device
        # By slot, only of requests that have them: float32 and bool, ``[vocabulary]`` each.
        self._shift: dict[int, torch.Tensor] = {}
        self._ends: dict[int, torch.Tensor] = {}

    def enter(self, slot: int, options: RowOptions | None) -> None:
        """Store the options of the request that enters ``slot``, and drop the last one's."""
        self._shift.pop(slot, None)
        self._ends.pop(slot, None)
        work = RowWork.NONE if options is None else options.work
        self.work[slot] = work
        if options is None or not work:
            return
        # A k of the whole vocabulary keeps all; so does a tiny share, and its logarithm is finite.
        top_k = min(options.top_k or self._vocabulary, self._vocabulary)
        neutral = replace(options, top_k=top_k, min_p=max(options.min_p, 1e-30))
        for name, numbers in self.numbers.items():
            numbers[slot].fill_(getattr(neutral, name))
        if work & RowWork.SHIFT:
            self._shift[slot] = options.shift(self._vocabulary, self._device)
        if work & RowWork.MIN_TOKENS:
            # A tokenizer's end token may have an id that the head does not have.
            ends = _ids([end for end in options.ends if end < self._vocabulary], self._device)
            no_id = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
            self._ends[slot] = no_id.index_fill_(0, ends, True)

    def work_of(self, on_host: np.ndarray) -> RowWork:
        """All that is to be done to the rows of a batch, whose slots are given."""
        return RowWork(int(np.bitwise_or.reduce(self.work[on_host])))

    def of(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """A parameter of ``slots`` (int64 ``[n]``), ``[n]``."""
        return self.numbers[name].index_select(0, slots)

    def shifts(self, on_host: np.ndarray) -> torch.Tensor:
        """What is added to the logits of each slot, float32 ``[n, vocabulary]``."""
        none = torch.zeros(self._vocabulary, device=self._device)
        return torch.stack([self._shift.get(slot, none) for slot in on_host.tolist()])

    def ends(self, on_host: np.ndarray) -> torch.Tensor:
        """The tokens that end the output of each slot too early, bool ``[n, vocabulary]``."""
        none = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
        return torch.stack([self._ends.get(slot, none) for slot in on_host.tolist()])
