"""Admission: which sampling parameters a diffusion request may carry.

Raised errors reach an HTTP client as status 400 with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_dllm.config import (
    SettingsError,
    parse_request_options,
    refuse_canvas_options,
    refuse_foreign,
)

# Below this vLLM itself takes a temperature for greedy.
GREEDY_EPSILON = 1e-5

# Parameters that would have to change the distribution or report it, and do neither yet:
# (name, is it set?)
_IsSet = Callable[[Any], Any]
_UNSUPPORTED: tuple[tuple[str, _IsSet], ...] = (
    ("presence_penalty", lambda params: params.presence_penalty),
    ("frequency_penalty", lambda params: params.frequency_penalty),
    ("repetition_penalty", lambda params: params.repetition_penalty != 1.0),
    ("min_tokens", lambda params: params.min_tokens > 0),
    ("logit_bias", lambda params: params.logit_bias),
    ("allowed_token_ids", lambda params: params.allowed_token_ids is not None),
    ("bad_words", lambda params: params.bad_words),
    ("prompt_logprobs", lambda params: params.prompt_logprobs is not None),
    ("prompt_logprob_token_ids", lambda params: params.prompt_logprob_token_ids is not None),
    ("structured_outputs", lambda params: params.structured_outputs is not None),
    ("thinking_token_budget", lambda params: params.thinking_token_budget is not None),
    ("trace_decode_token_ids", lambda params: params.trace_decode_token_ids is not None),
)

# What a model that samples supports, and a greedy one does not yet.
_WHOLE_ROWS: tuple[tuple[str, _IsSet], ...] = (
    ("logprobs", lambda params: params.logprobs is not None),
    ("logprob_token_ids", lambda params: params.logprob_token_ids),
)


@dataclass(frozen=True)
class Served:
    """What the front end knows of the model behind it.

    Attributes:
        algorithm: the server's decoding algorithm.
        parameters: its parameters, which a request may choose.
        samples: whether it draws tokens, so that a temperature means something.
    """

    algorithm: str
    parameters: tuple[str, ...]
    samples: bool


def validate_sampling_params(params: Any, served: Served) -> None:
    """Refuse what block-diffusion decoding does not support yet, by name.

    Greedy decoding makes ``seed``, ``top_p``, ``top_k`` and ``min_p`` harmless (the most
    likely token always survives them), so they are accepted, as vLLM does for any model.

    Raises:
        VLLMValidationError: names the parameter.
    """
    if served.samples:
        _refuse_min_p(params)
    elif params.temperature >= GREEDY_EPSILON:
        raise VLLMValidationError(
            f"temperature={params.temperature} is not supported with this diffusion model yet: "
            "decoding is greedy. Leave temperature out of an HTTP request, or set it to 0 "
            "(offline, SamplingParams() without temperature means 1.0; use "
            "SamplingParams(temperature=0) or llm.get_default_sampling_params()).",
            parameter="temperature",
            value=params.temperature,
        )
    for name, is_set in _UNSUPPORTED + (() if served.samples else _WHOLE_ROWS):
        if is_set(params):
            raise VLLMValidationError(
                f"{name} is not supported with diffusion models yet.", parameter=name
            )
    try:
        options = parse_request_options(params.extra_args)
        refuse_foreign("diffusion_", options.parameters, served.algorithm, served.parameters)
        if not served.samples:
            refuse_canvas_options(options)
    except SettingsError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def _refuse_min_p(params: Any) -> None:
    if params.min_p > 0 and params.temperature >= GREEDY_EPSILON:
        raise VLLMValidationError(
            "min_p is not supported with sampling diffusion models yet.", parameter="min_p"
        )
