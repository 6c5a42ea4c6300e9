"""Admission: which sampling parameters a diffusion request may carry.

Raised errors reach an HTTP client as status 400 with the parameter's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.settings.parsing import refuse_canvas_options
from vllm_dllm.settings.ranges import MAX_FLOAT32, SettingsError, cut, shown
from vllm_dllm.settings.resolution import Served

# Below this vLLM itself takes a temperature for greedy.
GREEDY_EPSILON = 1e-5

# Beyond, a float32 logit times or over the penalty is no number.
LEAST_PENALTY, MOST_PENALTY = 1e-30, 1e30

# What travels to the engine in a message, and what a slot keeps a seed in.
LEAST_INT64, MOST_INT64 = -(2**63), 2**63 - 1

# What no diffusion model can do, or not yet: (name, is it set?, why)
_IsSet = Callable[[Any], Any]
_UNSUPPORTED: tuple[tuple[str, _IsSet, str], ...] = (
    (
        "prompt_logprobs",
        lambda params: params.prompt_logprobs is not None,
        "a prompt token is read together with those behind it, so it has no probability given "
        "those before it (in a chat, echo asks for it, too)",
    ),
    (
        "prompt_logprob_token_ids",
        lambda params: params.prompt_logprob_token_ids is not None,
        "see prompt_logprobs",
    ),
    (
        "thinking_token_budget",
        lambda params: params.thinking_token_budget is not None,
        "tokens are not decided one after the other",
    ),
    (
        "trace_decode_token_ids",
        lambda params: params.trace_decode_token_ids is not None,
        "tokens are not decided one after the other",
    ),
)


def validate_bad_words(params: Any) -> None:
    """Refuse words of several tokens, once the tokenizer has said which they are.

    Raises:
        VLLMValidationError: there is one.
    """
    if any(len(word) > 1 for word in params.bad_words_token_ids or ()):
        raise VLLMValidationError(
            "bad_words is not supported with diffusion models for words of several tokens: "
            "positions decided in the same step cannot see each other; only words of one token "
            "can be ruled out.",
            parameter="bad_words",
        )


def refuse_misplaced(request: Any, endpoints: Iterable[type[Any]]) -> None:
    """Refuse what vLLM would pass over: fields that its class for this endpoint does not know.

    Those that nobody knows it passes over for all models. Refused are options of ours, old ones of
    vLLM, and whatever another endpoint would honour, unless it asks for what happens anyway.

    Args:
        request: of vLLM's HTTP server.
        endpoints: classes of such requests.

    Raises:
        VLLMValidationError: names the field of the HTTP request and where it belongs.
    """
    unknown = request.model_extra or {}
    elsewhere = _fields(tuple(endpoints)) if unknown else {}
    for name, value in unknown.items():
        if name.startswith("guided_"):
            problem = "is what vLLM called it once; use structured_outputs."
        elif name.startswith("diffusion_"):
            problem = f'belongs into vllm_xargs: {{"vllm_xargs": {{"{cut(name)}": ...}}}}.'
        elif name in elsewhere and value is not None and value not in elsewhere[name]:
            problem = "is not supported on this endpoint; others know it."
        else:
            continue
        raise VLLMValidationError(f"{cut(name)} {problem}", parameter=cut(name))


@cache
def _fields(endpoints: tuple[type[Any], ...]) -> dict[str, list[Any]]:
    """The fields of requests and of sampling parameters, each with its defaults."""
    fields: dict[str, list[Any]] = {}
    for endpoint in endpoints:
        for name, field in endpoint.model_fields.items():
            fields.setdefault(name, []).append(field.get_default(call_default_factory=True))
    defaults = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        if not name.startswith("_"):
            fields.setdefault(name, []).append(getattr(defaults, name))
    return fields


def _refused(name: str, sentence: str, value: Any = None) -> VLLMValidationError:
    return VLLMValidationError(f"{name} {sentence}.", parameter=name, value=value)


def _whole_numbers(params: Any) -> Iterator[tuple[str, int]]:
    """(name, value) of the parameters that are whole numbers."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value
    repetition = params.repetition_detection
    for field in fields(repetition) if repetition is not None else ():
        yield f"repetition_detection.{field.name}", getattr(repetition, field.name)


def validate_numbers(params: Any) -> None:
    """Refuse numbers that do not fit what holds them on their way.

    Raises:
        VLLMValidationError: names the parameter.
    """
    for name, value in _whole_numbers(params):
        if not LEAST_INT64 <= value <= MOST_INT64:
            raise _refused(name, f"must fit 64 bits, got {shown(value)}")
    if params.seed is not None and params.seed + params.n - 1 > MOST_INT64:
        # vLLM gives the i-th of n samples the seed plus i.
        raise _refused(
            "seed", f"plus n - 1 must be at most 2**63 - 1, got seed={params.seed}, n={params.n}"
        )
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= MAX_FLOAT32 and bias != -math.inf:
            raise _refused("logit_bias", f"of token {token} must fit a float32, got {bias}")
    if not LEAST_PENALTY <= params.repetition_penalty <= MOST_PENALTY:
        raise _refused(
            "repetition_penalty",
            f"must be from {LEAST_PENALTY} to {MOST_PENALTY}, got {params.repetition_penalty}",
            params.repetition_penalty,
        )


def validate_sampling_params(params: Any, served: Served) -> None:
    """Refuse what block-diffusion decoding cannot do, by name.

    Greedy decoding makes ``seed``, ``top_p``, ``top_k`` and ``min_p`` harmless (the most
    likely token always survives them), so they are accepted, as vLLM does for any model.

    Raises:
        VLLMValidationError: names the parameter.
    """
    for name, is_set, reason in _UNSUPPORTED:
        if is_set(params):
            raise VLLMValidationError(
                f"{name} is not supported with diffusion models: {reason}.", parameter=name
            )
    validate_numbers(params)
    if served.mask_token is not None and params.allowed_token_ids == [served.mask_token]:
        raise VLLMValidationError(
            "allowed_token_ids allows nothing but the mask token, which is never put out.",
            parameter="allowed_token_ids",
        )
    try:
        options = served.options(params.extra_args)
        algorithm = served.choose(options).algorithm
        if served.mask_token is not None:
            refuse_canvas_options(options)
        if options.stream_prefix and algorithm.edits:
            raise SettingsError(
                f"diffusion_stream_prefix: {algorithm.name} may still change what it has decided"
            )
    except SettingsError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
    if params.temperature >= GREEDY_EPSILON and not algorithm.samples:
        raise VLLMValidationError(
            f"temperature={params.temperature} is not supported by {algorithm.name}, which "
            "follows the most likely tokens from step to step; set it to 0.",
            parameter="temperature",
            value=params.temperature,
        )
