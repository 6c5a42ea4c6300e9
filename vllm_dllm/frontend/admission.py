"""Admission: which sampling parameters a diffusion request may carry.

What is refused raises ``VLLMValidationError``, which reaches an HTTP client as status 400 with the
parameter's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.frontend import called
from vllm_dllm.frontend.refusal import refused
from vllm_dllm.ranges import MAX_FLOAT32, SettingsError, shown
from vllm_dllm.settings.resolution import GREEDY_EPSILON, ResolvedRequest, Served, StepDetails

# Outside this range, a float32 logit multiplied or divided by the penalty overflows.
LEAST_PENALTY, MOST_PENALTY = 1e-30, 1e30

# The range of integers in a message to the engine and in the tensor that holds a slot's seed.
LEAST_INT64, MOST_INT64 = -(2**63), 2**63 - 1

# Parameters that are unsupported with diffusion models, each with the reason.
_UNSUPPORTED = {
    "prompt_logprobs": "a prompt token is read together with those after it, so it has no "
    "probability given those before it; remove it",
    "prompt_logprob_token_ids": "see prompt_logprobs; remove it",
    "thinking_token_budget": "tokens are not decided one after the other; remove it",
    "trace_decode_token_ids": "tokens are not decided one after the other; remove it",
}


class AdmittedParams(SamplingParams):
    """A request's parameters, validated by this package's rules instead of vLLM's.

    vLLM's own rules for diffusion models refuse every temperature but 1.0.
    """

    @classmethod
    def of(cls, params: SamplingParams) -> AdmittedParams:
        """A copy of `params`, which are not changed."""
        clone, made = params.clone(), cls.__new__(cls)
        for name in SamplingParams.__struct_fields__:
            setattr(made, name, getattr(clone, name))
        made.skip_clone = True  # nobody else has this copy, so vLLM need not copy it deeply again
        return made

    def _validate_diffusion(self, model_config: Any) -> None:
        """Do nothing: `validate_sampling_params` has validated them."""


def validate_bad_words(params: SamplingParams) -> None:
    """Refuse bad words that the tokenizer has turned into several ids."""
    if any(len(word) > 1 for word in params.bad_words_token_ids or ()):
        raise refused(
            "bad_words",
            "is not supported with diffusion models for words of several tokens: positions decided "
            "in the same step cannot see each other; only words of one token can be ruled out",
        )


def validate_numbers(params: SamplingParams) -> None:
    """Refuse numbers that overflow the types that carry them to the sampler."""
    numbers = {name: getattr(params, name) for name in params.__struct_fields__}
    repetition = params.repetition_detection
    for field in fields(repetition) if repetition is not None else ():
        numbers[f"repetition_detection.{field.name}"] = getattr(repetition, field.name)
    for name, value in numbers.items():
        if isinstance(value, int) and not LEAST_INT64 <= value <= MOST_INT64:
            raise refused(name, f"must fit 64 bits, got {shown(value)}")
    if params.seed is not None and params.seed + params.n - 1 > MOST_INT64:
        # vLLM seeds the i-th of n samples with the seed plus i.
        raise refused(
            "seed", f"plus n - 1 must be at most 2**63 - 1, got seed={params.seed}, n={params.n}"
        )
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= MAX_FLOAT32 and bias != -math.inf:
            raise refused("logit_bias", f"of token {token} must fit a float32, got {bias}")
    if not LEAST_PENALTY <= params.repetition_penalty <= MOST_PENALTY:
        raise refused(
            "repetition_penalty",
            f"must be from {LEAST_PENALTY} to {MOST_PENALTY}, got {params.repetition_penalty}",
            params.repetition_penalty,
        )


def refuse_contradictions(
    params: SamplingParams, constrained: bool, mask_token: int | None, vocabulary_size: int
) -> None:
    """Refuse parameters that together leave no token to choose.

    `params` has the ids that vLLM adds for end-of-text tokens and bad words. If `constrained`, only
    its ``logprob_token_ids`` may be chosen.
    """
    own = params.logprob_token_ids if constrained else params.allowed_token_ids
    allowed: Sequence[int] = range(vocabulary_size) if own is None else own
    biases = params.logit_bias or {}
    excluded = {
        "bad_words": {word[0] for word in params.bad_words_token_ids or () if len(word) == 1},
        "logit_bias": {token for token, bias in biases.items() if bias == -math.inf},
        "min_tokens": set(params.all_stop_token_ids) if params.min_tokens > 0 else set(),
    }
    never = {mask_token}.union(*excluded.values())
    if any(token not in never for token in allowed):  # ends early for nearly every request
        return
    vocabulary = set(range(vocabulary_size))
    names = ["logprob_token_ids" if constrained else "allowed_token_ids"]
    names = names if vocabulary - set(allowed) else []
    names += [name for name, tokens in excluded.items() if tokens & vocabulary]
    raise VLLMValidationError(
        f"no token is left to choose, given {' and '.join(names)}"
        + (" (min_tokens excludes whatever ends a text)" if "min_tokens" in names else "")
        + "; allow more tokens.",
        parameter=names[-1],
    )


def validate_sampling_params(
    params: SamplingParams,
    served: Served,
    own_maximum: bool,
    details: StepDetails = StepDetails.NOTHING,
    constraint_yields: bool = False,
) -> ResolvedRequest:
    """Refuse, by name, what block-diffusion decoding cannot do, and resolve the request's options.

    ``seed``, ``top_p``, ``top_k`` and ``min_p`` are also accepted with greedy decoding, as in vLLM
    for any model, because the most likely token always survives them.

    Args:
        params: not changed but for a constraint that yields.
        served: what a request may choose.
        own_maximum: whether the request itself sets its maximum number of output tokens (vLLM's
            HTTP server adds one).
        details: what the server wants to know about the request's steps.
        constraint_yields: the constraint only keeps optional calls valid, and the request did not
            ask for it, so it is dropped where constraints are excluded.
    """
    for parameter, reason in _UNSUPPORTED.items():
        if getattr(params, parameter) is not None:
            name = called(parameter)
            raise VLLMValidationError(
                f"{name} is not supported with diffusion models: {reason}.",
                parameter=name.partition(" ")[0],
            )
    validate_numbers(params)
    if served.mask_token is not None and params.allowed_token_ids == [served.mask_token]:
        raise refused(
            "allowed_token_ids",
            "allows nothing but the mask token, which is never generated; allow other tokens",
        )
    try:
        options: Mapping[str, Any] = {}
        if params.extra_args:
            from vllm_dllm.settings.parsing import parse_options

            options = parse_options(params.extra_args, served)
        decoding = served.choose(options)
        excluded = served.excludes | decoding.algorithm.excludes
        if constraint_yields and "constraints" in excluded:
            params.structured_outputs = None
        if options:
            from vllm_dllm.settings.parsing import refuse_without_effect

            constrained = params.structured_outputs is not None
            masked = served.mask_token is not None
            asked = masked, constrained, own_maximum, params.max_tokens
            refuse_without_effect(options, decoding, *asked)
    except SettingsError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
    algorithm = decoding.algorithm
    if params.temperature >= GREEDY_EPSILON and not algorithm.samples:
        raise VLLMValidationError(
            f"temperature={params.temperature} is not supported by {algorithm.name}, which "
            "follows the most likely tokens from step to step; set it to 0.",
            parameter="temperature",
            value=params.temperature,
        )
    limits = {
        "constraint_depth": served.settings.constraint_depth,
        "constraint_tokens": None if own_maximum else served.settings.constraint_tokens,
    }
    resolved = ResolvedRequest.of(decoding, {**limits, **options})
    if "traces" not in excluded:  # the server serves such a request without a trace
        resolved = replace(resolved, step_details=resolved.step_details | details)
    if excluded:
        from vllm_dllm.frontend.beside_decoding import refuse_excluded

        refuse_excluded(params, resolved, served, algorithm.excludes)
    return resolved
