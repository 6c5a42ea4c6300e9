"""What an algorithm or a model excludes is refused by name; the rest is served.

The name is that of the field that a client sent, not of the parameter that vLLM made of it.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_dllm.decoding.base import ALL_BESIDE, Beside
from vllm_dllm.frontend import current
from vllm_dllm.frontend.admission import validate_sampling_params
from vllm_dllm.frontend.http_request import Endpoints, HttpRequest
from vllm_dllm.settings.resolution import Served, StepDetails
from vllm_dllm.settings.server import DllmSettings

# A request's parameters, the one that is named, and what excludes it.
ASKED: list[tuple[dict[str, Any], str, Beside]] = [
    (
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        "structured_outputs",
        "constraints",
    ),
    ({"logprobs": 0}, "logprobs", "logprobs"),
    ({"extra_args": {"diffusion_trace": True}}, "diffusion_trace", "traces"),
    ({"extra_args": {"diffusion_return_step_maps": True}}, "diffusion_return_step_maps", "traces"),
    ({"presence_penalty": 0.1}, "presence_penalty", "row_options"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "row_options"),
    ({"logit_bias": {3: 1.0}}, "logit_bias", "row_options"),
    ({"allowed_token_ids": [3]}, "allowed_token_ids", "row_options"),
    ({"bad_words": ["a"]}, "bad_words", "row_options"),
    ({"min_tokens": 1, "max_tokens": 2}, "min_tokens", "row_options"),
    (
        {"extra_args": {"diffusion_stream_prefix": True}},
        "diffusion_stream_prefix",
        "canvas_options",
    ),
]


def served(excludes: frozenset[Beside]) -> Served:
    return Served("mask", "LowConfidence", DllmSettings(), mask_token=1, excludes=excludes)


@pytest.mark.parametrize(("asked", "name", "beside"), ASKED)
def test_what_is_excluded_is_refused_and_nothing_else(
    asked: dict[str, Any], name: str, beside: Beside
) -> None:
    params = SamplingParams(temperature=0, **asked)
    validate_sampling_params(params, served(ALL_BESIDE - {beside}), True)
    with pytest.raises(VLLMValidationError, match=f"{name}.* cannot be combined") as error:
        validate_sampling_params(params, served(frozenset({beside})), True)
    assert error.value.parameter == name


def test_optional_calls_stay_parsed_without_their_constraint() -> None:
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="a"))
    validate_sampling_params(params, served(ALL_BESIDE), True, constraint_yields=True)
    assert params.structured_outputs is None


def test_the_live_page_leaves_out_what_has_no_trace() -> None:
    params = SamplingParams(temperature=0)
    for excludes, details in (
        (ALL_BESIDE, StepDetails.NOTHING),
        (frozenset[Beside](), StepDetails.LIVE),
    ):
        found = validate_sampling_params(params, served(excludes), True, StepDetails.LIVE)
        assert found.step_details == details


# ---- the field that was sent

SCHEMA = {"type": "object", "properties": {}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
STRICT = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
NAMED = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
USER = [{"role": "user", "content": "a"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CLASSES = {CHAT: ChatCompletionRequest, RESPONSES: ResponsesRequest}
CLASSES |= {MESSAGES: AnthropicMessagesRequest, "/v1/completions": CompletionRequest}
LEAST = {CHAT: {"messages": USER}, RESPONSES: {"input": "a"}, "/v1/completions": {"prompt": "a"}}
LEAST |= {MESSAGES: {"messages": USER, "max_tokens": 2000}}
ANTHROPIC = {"tools": [{"name": "f", "input_schema": SCHEMA}]}
THINKING = {"type": "enabled", "budget_tokens": 1024}
CONSTRAINED = {"structured_outputs": StructuredOutputsParams(regex="a")}


def taken(path: str, body: dict[str, Any]) -> None:
    """Begin a request as vLLM's handler does: that of ``/v1/messages`` makes one of chats."""
    request: Any = CLASSES[path](model="m", **LEAST[path], **body)
    if path == MESSAGES:
        request = AnthropicServingMessages.to_chat_completion_request(request)
    current.set(HttpRequest(path=path))
    Endpoints(tuple(CLASSES.values()), ()).take(request)


@pytest.mark.parametrize(
    ("path", "body", "params", "field"),
    [
        (CHAT, TOOLS | {"tool_choice": "required"}, CONSTRAINED, "tool_choice"),
        (CHAT, TOOLS | {"tool_choice": NAMED}, CONSTRAINED, "tool_choice"),
        (CHAT, STRICT | {"tool_choice": "auto"}, CONSTRAINED, "tools.strict"),
        (CHAT, {"response_format": FORMAT}, CONSTRAINED, "response_format"),
        (CHAT, {"structured_outputs": {"regex": "a"}}, CONSTRAINED, "structured_outputs"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
            CONSTRAINED,
            "text.format",
        ),
        (RESPONSES, {"tools": [FLAT], "tool_choice": "required"}, CONSTRAINED, "tool_choice"),
        (MESSAGES, ANTHROPIC | {"tool_choice": {"type": "any"}}, CONSTRAINED, "tool_choice"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            CONSTRAINED,
            "output_config.format",
        ),
        (MESSAGES, {"thinking": THINKING}, {"thinking_token_budget": 1024}, "thinking"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, {"logprobs": 0}, "include"),
        ("/v1/completions", {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, "echo"),
        ("/v1/completions", {"prompt_logprobs": 1}, {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_the_field_that_was_sent(
    path: str, body: dict[str, Any], params: dict[str, Any], field: str
) -> None:
    token = current.set(None)
    try:
        taken(path, body)
        with pytest.raises(VLLMValidationError, match=f"^{field}") as error:
            validate_sampling_params(
                SamplingParams(temperature=0, **params), served(ALL_BESIDE), True
            )
    finally:
        current.reset(token)
    assert error.value.parameter == field
