"""A refusal names the field that a client sent, not the parameter that vLLM made of it."""

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

from vllm_dllm.decoding.base import ALL_BESIDE
from vllm_dllm.frontend import current
from vllm_dllm.frontend.admission import validate_sampling_params
from vllm_dllm.frontend.http_request import Endpoints, HttpRequest
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

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
    served = Served("mask", "LowConfidence", DllmSettings(), mask_token=1, excludes=ALL_BESIDE)
    token = current.set(None)
    try:
        taken(path, body)
        with pytest.raises(VLLMValidationError, match=f"^{field}") as error:
            validate_sampling_params(SamplingParams(temperature=0, **params), served, True)
    finally:
        current.reset(token)
    assert error.value.parameter == field
