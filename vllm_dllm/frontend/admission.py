"""Admission: which sampling parameters a diffusion request may carry.

Raised errors reach an HTTP client as status 400 with the parameter's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, NoReturn

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.ranges import MAX_FLOAT32, SettingsError, cut, shown
from vllm_dllm.settings.request import (
    REQUEST_PREFIX,
    refuse_canvas_options,
    refuse_misplaced_constraint_options,
)
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.resolved import GREEDY_EPSILON, RESOLVED, ResolvedRequest

# Outside this range, a float32 logit multiplied or divided by the penalty overflows.
LEAST_PENALTY, MOST_PENALTY = 1e-30, 1e30

# The range of integers in a message to the engine and in the tensor that holds a slot's seed.
LEAST_INT64, MOST_INT64 = -(2**63), 2**63 - 1

# Unsupported with diffusion models: (parameter, whether a request sets it, the reason).
_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "prompt_logprobs",
        lambda params: params.prompt_logprobs is not None,
        "a prompt token is read together with those behind it, so it has no probability given "
        "those before it; remove it (echo asks for it, too: in a chat, and with logprobs)",
    ),
    (
        "prompt_logprob_token_ids",
        lambda params: params.prompt_logprob_token_ids is not None,
        "see prompt_logprobs; remove it",
    ),
    (
        "thinking_token_budget",
        lambda params: params.thinking_token_budget is not None,
        "tokens are not decided one after the other; remove it",
    ),
    (
        "trace_decode_token_ids",
        lambda params: params.trace_decode_token_ids is not None,
        "tokens are not decided one after the other; remove it",
    ),
)


def validate_bad_words(params: Any) -> None:
    """Refuse a bad word that consists of several tokens.

    Args:
        params: vLLM's ``SamplingParams``, whose bad words the tokenizer has turned into ids.

    Raises:
        VLLMValidationError: there is such a word.
    """
    if any(len(word) > 1 for word in params.bad_words_token_ids or ()):
        raise VLLMValidationError(
            "bad_words is not supported with diffusion models for words of several tokens: "
            "positions decided in the same step cannot see each other; only words of one token "
            "can be ruled out.",
            parameter="bad_words",
        )


# Fields that no endpoint knows and under which clients may have put options.
_OTHER_PLACES = {
    "extra_body": "is an argument of OpenAI's Python client, which sends its content instead of "
    "it; put its content into the request itself.",
    "extra_args": 'is for SamplingParams in Python; over HTTP write {"vllm_xargs": {...}}.',
    "dllm": "holds settings of a server (--additional-config); a request's options are "
    '{"vllm_xargs": {"diffusion_...": ...}}.',
}


def refuse_misplaced_fields(
    unknown: Mapping[str, Any], request_classes: Iterable[type[Any]], options: Collection[str]
) -> None:
    """Refuse fields of an HTTP request that were meant to have an effect but would be ignored.

    vLLM ignores every field that its request class for this endpoint does not know. Among those,
    this function refuses our own options outside ``vllm_xargs`` or without their prefix, fields
    that hold options elsewhere, vLLM's old options for structured output, and any field that
    another endpoint honours, unless its value is a default. Any other field that no endpoint knows
    is ignored, as for any model.

    Args:
        unknown: the fields that this endpoint's class does not know, with their values.
        request_classes: the classes of the requests to all endpoints.
        options: the names of our options, without the prefix.

    Raises:
        VLLMValidationError: names the field of the HTTP request and where it belongs.
    """
    elsewhere = _defaults_of_fields(tuple(request_classes)) if unknown else {}
    for name, value in unknown.items():
        if name.startswith("guided_"):
            problem = "is what vLLM called it once; use structured_outputs."
        elif name in _OTHER_PLACES and value is not None:
            problem = _OTHER_PLACES[name]
        elif name.startswith(REQUEST_PREFIX):
            problem = f'belongs into vllm_xargs: {{"vllm_xargs": {{"{cut(name)}": ...}}}}.'
        elif name in options:
            option = REQUEST_PREFIX + name
            problem = f'is not read here; write {{"vllm_xargs": {{"{option}": ...}}}}.'
        elif name in elsewhere and value is not None and value not in elsewhere[name]:
            problem = "is not supported on this endpoint; others know it."
        else:
            continue
        raise VLLMValidationError(f"{cut(name)} {problem}", parameter=cut(name))


@cache
def _defaults_of_fields(request_classes: tuple[type[Any], ...]) -> dict[str, list[Any]]:
    """The fields of these requests and of sampling parameters, each with all of its defaults."""
    defaults: dict[str, list[Any]] = {}
    for request_class in request_classes:
        for name, field in request_class.model_fields.items():
            defaults.setdefault(name, []).append(field.get_default(call_default_factory=True))
    sampling_params = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        if not name.startswith("_"):
            defaults.setdefault(name, []).append(getattr(sampling_params, name))
    return defaults


def continue_last_message(request: Any, path: str) -> None:
    """Make an answer at ``/v1/messages`` continue a trailing message of the assistant.

    Anthropic's own API does the same. vLLM would begin a new message after it.

    Args:
        request: a request of vLLM's HTTP server, which may be changed.
        path: the path of the endpoint.

    Raises:
        VLLMValidationError: the assistant's last message is not text.
    """
    if not path.endswith("/v1/messages") or request.messages[-1]["role"] != "assistant":
        return
    last = request.messages[-1]
    if last.keys() != {"role", "content"} or not isinstance(last["content"], str):
        raise VLLMValidationError(
            "messages: a last message of the assistant is continued if it is a text, and this one "
            "is not; end with a message of the user.",
            parameter="messages",
        )
    request.continue_final_message, request.add_generation_prompt = True, False


def sets_its_maximum(request: Any) -> bool:
    """Whether an HTTP request sets a maximum number of output tokens.

    Args:
        request: a request of vLLM's HTTP server. The server's defaults do not count, except the one
            for completions, which it writes into every request.
    """
    if hasattr(request, "is_sampling_param_provided"):
        return bool(request.is_sampling_param_provided("max_tokens"))
    names = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & request.model_fields_set
    return any(getattr(request, name) is not None for name in names)


def refuse_beam_search() -> NoReturn:
    """Refuse a beam search.

    Raises:
        VLLMValidationError: always.
    """
    raise VLLMValidationError(
        "use_beam_search (LLM.beam_search) is not supported with diffusion models: it compares "
        "the beginnings of texts, and a canvas is not written from its beginning; remove it, and "
        "ask for several answers with n.",
        parameter="use_beam_search",
    )


def _refused(name: str, sentence: str, value: Any = None) -> VLLMValidationError:
    return VLLMValidationError(f"{name} {sentence}.", parameter=name, value=value)


def _whole_numbers(params: Any) -> Iterator[tuple[str, int]]:
    """(name, value) of each parameter that is an integer, including nested ones."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value
    repetition = params.repetition_detection
    for field in fields(repetition) if repetition is not None else ():
        yield f"repetition_detection.{field.name}", getattr(repetition, field.name)


def validate_numbers(params: Any) -> None:
    """Refuse numbers that overflow the types that carry them to the sampler.

    Args:
        params: vLLM's ``SamplingParams``.

    Raises:
        VLLMValidationError: names the parameter.
    """
    for name, value in _whole_numbers(params):
        if not LEAST_INT64 <= value <= MOST_INT64:
            raise _refused(name, f"must fit 64 bits, got {shown(value)}")
    if params.seed is not None and params.seed + params.n - 1 > MOST_INT64:
        # vLLM seeds the i-th of n samples with the seed plus i.
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


def may_exclude_all(params: Any, vocabulary_size: int) -> bool:
    """Whether the parameters may rule out enough tokens that `refuse_contradictions` has to run.

    That check builds sets of the vocabulary's size, which is too slow for every request. This one
    only counts, and doubles the count, because vLLM may add ids to those that the user gave.

    Args:
        params: vLLM's ``SamplingParams``, with or without vLLM's additions.
        vocabulary_size: number of ids.
    """
    if params.allowed_token_ids is not None or params.logprob_token_ids:
        return True
    # A bad word has two spellings, with and without a space before it.
    lists = (params.stop_token_ids, params.logit_bias, params.bad_words, params.bad_words)
    return 2 * sum(len(ruled_out or ()) for ruled_out in lists) >= vocabulary_size


def refuse_contradictions(
    params: Any, constrained: bool, mask_token: int | None, vocabulary_size: int
) -> None:
    """Refuse parameters that together leave no token to choose.

    Args:
        params: vLLM's ``SamplingParams``, including the ids that vLLM adds for end-of-text tokens
            and bad words.
        constrained: only ``logprob_token_ids`` may be chosen.
        mask_token: an id that is never chosen, or None.
        vocabulary_size: number of ids.

    Raises:
        VLLMValidationError: names the parameters.
    """
    vocabulary = set(range(vocabulary_size))
    allowed = params.logprob_token_ids if constrained else params.allowed_token_ids
    biases = params.logit_bias or {}
    ruled_out = {
        "logprob_token_ids" if constrained else "allowed_token_ids": (
            set() if allowed is None else vocabulary - set(allowed)
        ),
        "bad_words": {word[0] for word in params.bad_words_token_ids or () if len(word) == 1},
        "logit_bias": {token for token, bias in biases.items() if bias == -math.inf},
        "min_tokens": set(params.all_stop_token_ids) if params.min_tokens > 0 else set(),
    }
    if vocabulary - {mask_token} - set().union(*ruled_out.values()):
        return
    names = [name for name, tokens in ruled_out.items() if tokens & vocabulary]
    raise VLLMValidationError(
        f"no token is left to choose, given {' and '.join(names)}"
        + (" (min_tokens excludes whatever ends a text)" if "min_tokens" in names else "")
        + "; allow more tokens.",
        parameter=names[-1],
    )


def validate_sampling_params(params: Any, served: Served) -> None:
    """Refuse, by name, what block-diffusion decoding cannot do.

    ``seed``, ``top_p``, ``top_k`` and ``min_p`` are also accepted with greedy decoding, as in vLLM
    for any model, because the most likely token always survives them.

    Args:
        params: vLLM's ``SamplingParams``. This must not be the user's object: see
            `resolve_options`.
        served: the model's settings, and what a request may choose.

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
            "allowed_token_ids allows nothing but the mask token, which is never put out; allow "
            "other tokens.",
            parameter="allowed_token_ids",
        )
    resolved = resolve_options(params, served)
    algorithm = resolved.choice(served.corruption).algorithm
    if params.temperature >= GREEDY_EPSILON and not algorithm.samples:
        raise VLLMValidationError(
            f"temperature={params.temperature} is not supported by {algorithm.name}, which "
            "follows the most likely tokens from step to step; set it to 0.",
            parameter="temperature",
            value=params.temperature,
        )


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
        return made

    def _validate_diffusion(self, model_config: Any) -> None:
        validate_sampling_params(self, model_config.dllm)


def resolve_options(
    params: Any, served: Served, own_maximum: bool | None = None
) -> ResolvedRequest:
    """Resolve a request's diffusion options, or return what an earlier call resolved.

    The first call stores the result in the extra arguments of `params`, so `params` must not be
    the user's object.

    Args:
        params: vLLM's ``SamplingParams``.
        served: the model's settings, and what a request may choose.
        own_maximum: whether the request itself sets its maximum number of output tokens. None reads
            it from `params`, to which vLLM's HTTP server adds a maximum.

    Raises:
        VLLMValidationError: an option is unknown, out of range, or does not fit the others.
    """
    resolved_before = ResolvedRequest.given(params.extra_args)
    if resolved_before is not None:
        return resolved_before
    if own_maximum is None:
        own_maximum = params.max_tokens is not None
    try:
        options = served.options(params.extra_args)
        refuse_misplaced_constraint_options(
            options, params.structured_outputs is not None, own_maximum
        )
        choice = served.choose(options)
        if served.mask_token is not None:
            refuse_canvas_options(options)
        if options.stream_prefix and choice.algorithm.edits:
            raise SettingsError(
                f"diffusion_stream_prefix: {choice.algorithm.name} may still change what it has "
                "decided; remove it"
                + ("" if served.mask_token is None else ", or choose another diffusion_algorithm")
            )
    except SettingsError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
    resolved = replace(
        ResolvedRequest.of(choice, options),
        constraint_depth=served.constraint_depth(options),
        constraint_tokens=None if own_maximum else served.constraint_tokens(options),
    )
    params.extra_args = {**(params.extra_args or {}), RESOLVED: resolved}
    return resolved
