"""The options of a request that need whole rows of logits: biases, filters and logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


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

    @classmethod
    def of(cls, params: Any, prompt_length: int, constrained: bool = False) -> RowOptions | None:
        """The options in vLLM's ``SamplingParams``, or None where a request has none of them.

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
        )
        if options == cls():
            return None
        return replace(options, prompt_length=prompt_length)

    @property
    def reports(self) -> bool:
        """Whether logprobs are reported with the tokens."""
        return self.logprobs is not None or bool(self.token_ids)

    @property
    def biases(self) -> bool:
        """Whether logits change before tokens are chosen or drawn, at any temperature."""
        return self.penalises or any((self.logit_bias, self.allowed, self.banned, self.min_tokens))

    @property
    def penalises(self) -> bool:
        """Whether there is a penalty for earlier tokens."""
        return (self.presence, self.frequency, self.repetition) != (0, 0, 1)

    @property
    def filters(self) -> bool:
        """Whether a draw is restricted to likely tokens."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1, 0)
