"""Each field of a request is treated as vLLM treats it for other models, or a reason says why not.

A causal model without this package and a diffusion model with it get the same requests: each field
of vLLM's classes of OpenAI's, Anthropic's and token requests, the fields of the others as well, and
whole requests as well-known clients send them. The answers must have the same status and the same
form. ``pytest -s`` prints the table of fields.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, NamedTuple

import pytest
from vllm.sampling_params import SamplingParams

from tests.serving.servers.conftest import TOOLS
from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import Server
from tests.support.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Fields = dict[str, Any]
USER = [{"role": "user", "content": "copy ab"}]
PREFILLED = [*USER, {"role": "assistant", "content": "a"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
FLAT_TOOL = {"type": "function", **FUNCTION, "strict": False}
FLAT_FORMAT = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
ANTHROPIC_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
PART = [{"type": "text", "text": "copy ab", "cache_control": {"type": "ephemeral"}}]
PREFILLED_PART = [*USER, {"role": "assistant", "content": PART}]
SAID = {"format": {"type": "json_schema", "schema": SCHEMA}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": True}}
THOUGHT = {"type": "thinking", "thinking": "a", "signature": "s"}
REGEX = {"regex": "a+"}
# A whole call ends with its constraint, and a constraint excludes `ignore_eos`.
CALLED = {"ignore_eos": False, "max_tokens": 64}
CONTINUED = {"messages": PREFILLED, "add_generation_prompt": False, "continue_final_message": True}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "f"}],
}


class Endpoint(NamedTuple):
    """An endpoint, vLLM's class of its requests, and a request that both servers answer."""

    path: str
    module: str
    name: str
    body: Fields

    @property
    def known(self) -> set[str]:
        """The fields of its class, and of parameters within it."""
        request = getattr(import_module(f"vllm.entrypoints.{self.module}"), self.name)
        nested = SamplingParams.__struct_fields__ if self.name == "GenerateRequest" else ()
        parameters = {f"sampling_params.{name}" for name in nested if not name.startswith("_")}
        return {*request.model_fields} | parameters


# Greedy answers of fixed length: their numbers of tokens do not depend on the model.
FIXED = {"temperature": 0, "ignore_eos": True}
ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        "openai.completion.protocol",
        "CompletionRequest",
        {"prompt": "copy ab", "max_tokens": 4, **FIXED},
    ),
    Endpoint(
        "/v1/chat/completions",
        "openai.chat_completion.protocol",
        "ChatCompletionRequest",
        {"messages": USER, "max_tokens": 4, **FIXED},
    ),
    Endpoint(
        "/v1/chat/completions/batch",
        "openai.chat_completion.protocol",
        "BatchChatCompletionRequest",
        {"messages": [USER, USER], "max_tokens": 4, "temperature": 0},
    ),
    Endpoint(
        "/v1/responses",
        "openai.responses.protocol",
        "ResponsesRequest",
        {"input": "copy ab", "max_output_tokens": 4, **FIXED},
    ),
    Endpoint(
        "/v1/messages",
        "anthropic.protocol",
        "AnthropicMessagesRequest",
        {"messages": USER, "max_tokens": 4, "temperature": 0},
    ),
    Endpoint(
        "/inference/v1/generate",
        "scale_out.token_in_token_out.protocol",
        "GenerateRequest",
        {"token_ids": [99, 111], "sampling_params": {"max_tokens": 4, **FIXED}},
    ),
    Endpoint(
        "/generative_scoring",
        "generate.generative_scoring.serving",
        "GenerativeScoringRequest",
        {"query": "copy ab", "items": ["a", "b"], "label_token_ids": [97, 98]},
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        "anthropic.protocol",
        "AnthropicCountTokensRequest",
        {"messages": USER},
    ),
    Endpoint(
        "/tokenize",
        "serve.tokenize.protocol",
        "TokenizeCompletionRequest",
        {"prompt": "copy ab"},
    ),
    Endpoint("/tokenize", "serve.tokenize.protocol", "TokenizeChatRequest", {"messages": USER}),
    Endpoint("/detokenize", "serve.tokenize.protocol", "DetokenizeRequest", {"tokens": [97, 98]}),
)

# Values for each field, wherever it belongs.
VALUES: Mapping[str, list[Any]] = {
    "add_generation_prompt": [True, False],
    "add_special_tokens": [True],
    "allowed_token_ids": [[97, 98]],
    "apply_softmax": [True, False],
    "background": [False],
    "bad_words": [["a"], ["copy ab"]],
    "best_of": [1],
    "cache_salt": ["salt"],
    "chat_template": ["x{{ messages[0].content }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "content_parts": [[]],
    "continue_final_message": [False],
    "detokenize": [True, False],
    "documents": [[{"title": "a", "text": "b"}]],
    "early_stopping": [True],
    "ec_transfer_params": [{"a": 1}],
    "echo": [True],
    "enable_response_messages": [True],
    "extra_args": [{"session_id": "a"}, {"of_nobody": 1}],
    "features": [None],
    "flat_logprobs": [True],
    "frequency_penalty": [0.5],
    "guided_decoding_backend": ["xgrammar"],
    "ignore_eos": [True],
    "include": [["reasoning.encrypted_content"], ["message.output_text.logprobs"]],
    "include_reasoning": [False],
    "include_stop_str_in_output": [True],
    "input": [[{"role": "user", "content": [{"type": "input_text", "text": "copy ab"}]}]],
    "instructions": ["Be brief."],
    "item_first": [True],
    "items": [["a"], [[97], [98, 99]]],
    "joint": [True],
    "kv_transfer_params": [{"a": 1}],
    "label_token_ids": [[97], [10**6]],
    "length_penalty": [1.5],
    "logit_bias": [{"97": 5.0}],
    "logprob_token_ids": [[97, 98]],
    "logprobs": [1],
    "max_completion_tokens": [3],
    "max_output_tokens": [3],
    "max_tokens": [3],
    "max_tool_calls": [2],
    "media_io_kwargs": [{"image": {}}],
    "messages": [USER, PREFILLED, []],
    "metadata": [{"user_id": "u"}],
    "min_p": [0.1],
    "min_tokens": [2],
    "mm_payload": ["none"],
    "mm_processor_kwargs": [{}],
    "model": ["m", "another"],
    "n": [1, 2],
    "output_config": [{"effort": "low"}, SAID],
    "output_kind": [2],
    "output_mode": ["text"],
    "output_text_buffer_length": [0],
    "parallel_tool_calls": [False],
    "parse_context": [None],
    "presence_penalty": [0.5],
    "previous_input_messages": [[]],
    "previous_response_id": ["resp_of_nobody"],
    "priority": [0, 1],
    "prompt": ["copy ab", [[99, 111]], ["a", "b"]],
    "prompt_cache_key": ["key"],
    "prompt_cache_options": [{"ttl": "1h"}],
    "prompt_cache_retention": ["24h"],
    "prompt_embeds": ["AAAA"],
    "prompt_logprob_start": [1],
    "prompt_logprob_token_ids": [[[97]]],
    "prompt_logprobs": [0, 1],
    "query": ["copy", [99, 111]],
    "reasoning": [{"effort": "low", "summary": "auto"}],
    "reasoning_effort": ["low"],
    "reasoning_ended": [True],
    "reasoning_parser_kwargs": [{"chat_template_kwargs": {}}],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 4, "min_pattern_size": 1}],
    "repetition_penalty": [1.1],
    "request_id": ["some-id"],
    "response_format": [{"type": "text"}, {"type": "json_object"}, FORMAT],
    "return_mm_kwargs": [False],
    "return_prompt_text": [True],
    "return_token_ids": [True],
    "return_token_offsets": [True],
    "return_token_strs": [True],
    "return_tokens_as_token_ids": [True],
    "return_weight_versions": [True],
    "routed_experts_prompt_start": [0],
    "safety_identifier": ["u"],
    "sampling_params": [{"max_tokens": 3, **FIXED}],
    "seed": [7],
    "service_tier": ["auto", "default"],
    "session_id": ["s"],
    "skip_clone": [True],
    "skip_reading_prefix_cache": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "stop": ["zz", ["zz", "\n"]],
    "stop_sequences": [["zz"]],
    "stop_token_ids": [[98]],
    "store": [False, True],
    "stream": [False, True],
    "stream_interval": [2],
    "stream_options": [None],
    "structured_outputs": [{"regex": "a+"}],
    "suffix": ["b"],
    "system": ["Be brief.", PART],
    "temperature": [0, 0.7, 1],
    "text": [{"format": {"type": "text"}}, {"format": FLAT_FORMAT}, {"verbosity": "low"}],
    "thinking": [
        {"type": "disabled"},
        {"type": "adaptive"},
        {"type": "enabled", "budget_tokens": 1024},
    ],
    "thinking_token_budget": [5],
    "token_ids": [[99, 111, 112]],
    "tokens": [[99, 111], [], [10**6]],
    "token_offsets": [None],
    "tool_choice": ["none"],
    "tools": [[TOOL]],
    "top_k": [5],
    "top_logprobs": [2],
    "top_p": [0.9],
    "trace_decode_token_ids": [[97, 98, 99, 100]],
    "truncate_prompt_tokens": [3],
    "truncation": ["auto", "disabled"],
    "truncation_side": ["left"],
    "use_beam_search": [False, True],
    "user": ["u"],
    "vllm_xargs": [{"session_id": "a"}, {"of_nobody": 1}],
    "watermarking": [False],
}
# What a field of one class takes, with what it needs beside it.
_ONE: Mapping[str, list[Fields]] = {
    "AnthropicMessagesRequest": [
        {"messages": [{"role": "user", "content": PART}]},
        {"messages": PREFILLED_PART},
        {"messages": [*USER, {"role": "assistant", "content": [CALL]}]},
        {"messages": [*USER, {"role": "assistant", "content": [THOUGHT]}]},
        {"tools": [ANTHROPIC_TOOL]},
        *(
            {"tool_choice": choice, "tools": [ANTHROPIC_TOOL]}
            for choice in ({"type": "auto"}, {"type": "none"})
        ),
        {"tool_choice": {"type": "any"}, "tools": [ANTHROPIC_TOOL], "max_tokens": 64},
    ],
    "BatchChatCompletionRequest": [{"messages": [USER]}, {"logprobs": True, "top_logprobs": 1}],
    "ChatCompletionRequest": [
        {"logprobs": True, "top_logprobs": 1},
        {"echo": True, "logprobs": True, "top_logprobs": 1, **CONTINUED},
        {"echo": True, **CONTINUED},
        {"tool_choice": "none", "tools": [TOOL]},
        {"tool_choice": "auto", "tools": [TOOL]},
        {"tool_choice": "required", "tools": [TOOL], **CALLED},
        {"tool_choice": NAMED, "tools": [TOOL], **CALLED},
        {"structured_outputs": REGEX, "tool_choice": "required", "tools": [TOOL], **CALLED},
        {"response_format": FORMAT, "tool_choice": "required", "tools": [TOOL], **CALLED},
        *({"response_format": one, **CALLED} for one in ({"type": "json_object"}, FORMAT)),
        {"structured_outputs": REGEX, **CALLED},
        {"stop": ["zz"], "response_format": FORMAT, **CALLED},
    ],
    "CompletionRequest": [
        {"echo": True, "logprobs": 1},
        {"max_tokens": 4, "max_completion_tokens": 4},
        {"stop": ["zz"], "structured_outputs": REGEX, **CALLED},
    ],
    "ResponsesRequest": [
        {"tools": [FLAT_TOOL]},
        {"tool_choice": "none", "tools": [FLAT_TOOL]},
        {"tool_choice": "auto", "tools": [FLAT_TOOL]},
        *(
            {"tool_choice": choice, "tools": [FLAT_TOOL], "ignore_eos": False}
            | {"max_output_tokens": 64}
            for choice in ("required", {"type": "function", "name": "f"}, ALLOWED)
        ),
    ],
}
# The endpoints that only render take requests of the classes above.
_RENDERED: Mapping[str, list[Fields]] = {
    "/v1/completions/render": [{"prompt": "copy ab"}, {"prompt": ["a", "b"]}, {"prompt": [[99]]}],
    "/v1/chat/completions/render": [
        {"messages": USER},
        {"messages": USER, "tools": [TOOL], "tool_choice": "auto"},
        {"messages": []},
    ],
    "/v1/responses/render": [{"input": "copy ab"}, {"input": USER, "instructions": "Be brief."}],
    "/v1/messages/render": [
        {"messages": USER, "max_tokens": 4, "system": "Be brief."},
        {"messages": [], "max_tokens": 4},
    ],
}
_ANSWER = {"stream": True, "stream_options": {"include_usage": True}}
_SYSTEM = {"role": "system", "content": "You are an agent."}
_CHAT = "/v1/chat/completions"
_STRICT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
_LOOSE_TOOL = {"type": "function", "function": {**FUNCTION, "strict": False}}
_INPUT = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "copy ab"}]}
]
_CLAUDE_SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"},
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
]
# Requests as clients send them, by what their public documentation and sources say; above each
# the project, where it is public.
CLIENTS: Mapping[str, tuple[str, Fields]] = {
    # https://github.com/openai/openai-python
    "openai": (_CHAT, {"messages": [_SYSTEM, *USER], "max_completion_tokens": 4, "store": True}),
    # https://github.com/openai/openai-python
    "openai-responses": ("/v1/responses", {"input": "copy ab", "store": True, "metadata": {}}),
    # https://github.com/openai/openai-agents-python
    "openai-agents-responses": (
        "/v1/responses",
        {"input": USER, "instructions": "Be brief.", "tools": [FLAT_TOOL], "include": []}
        | {"max_output_tokens": 8, "parallel_tool_calls": True, "truncation": "disabled"},
    ),
    # https://github.com/openai/codex
    "codex": (
        "/v1/responses",
        {"instructions": "You are Codex.", "input": _INPUT, "tools": [FLAT_TOOL], "stream": True}
        | {"tool_choice": "auto", "parallel_tool_calls": True, "store": False}
        | {"reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "thread"}
        | {"include": ["reasoning.encrypted_content"], "client_metadata": {"session_id": "a"}}
        | {"text": {"verbosity": "low"}},
    ),
    "claude-code": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": PART}], "system": _CLAUDE_SYSTEM, "stream": True}
        | {"tools": [ANTHROPIC_TOOL], "metadata": {"user_id": "u"}, "max_tokens": 16}
        | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}
        | {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ),
    # https://github.com/anthropics/anthropic-sdk-python
    "anthropic": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 4, "service_tier": "auto", "stop_sequences": ["zz"]}
        | {"temperature": 0, "top_k": 5, "inference_geo": "us", "container": None},
    ),
    # https://github.com/badlogic/pi-mono
    "pi": (
        _CHAT,
        {"messages": [_SYSTEM, *USER], **_ANSWER, "store": False, "max_completion_tokens": 8}
        | {"tools": [_LOOSE_TOOL], "reasoning_effort": "medium", "prompt_cache_key": "session"},
    ),
    # https://github.com/cline/cline
    "cline": (
        _CHAT,
        {"messages": [_SYSTEM, *USER], "temperature": 0, **_ANSWER, "tools": [TOOL]}
        | {"tool_choice": "auto", "parallel_tool_calls": False},
    ),
    # https://github.com/sst/opencode
    "opencode": (
        _CHAT,
        {"messages": [_SYSTEM, *USER], "max_tokens": 8, **_ANSWER, "tools": [TOOL]}
        | {"tool_choice": "auto", "top_p": 1, "promptCacheKey": "session"},
    ),
    # https://github.com/QwenLM/qwen-code
    "qwen-code": (
        _CHAT,
        {"messages": [_SYSTEM, *USER], **_ANSWER, "max_tokens": 8, "tools": [TOOL]}
        | {"metadata": {"sessionId": "a", "promptId": "b"}, "vl_high_resolution_images": True},
    ),
    # https://github.com/continuedev/continue
    "continue": (
        "/v1/completions",
        {"prompt": "copy ab", "max_tokens": 4, "temperature": 0.01, "stop": ["/src/", "\n\n"]}
        | {"stream": True, "raw": True},
    ),
    # https://github.com/langchain-ai/langchain
    "langchain-react": (
        _CHAT,
        {"messages": USER, "max_tokens": 64, "stop": ["\nObservation"], "response_format": FORMAT},
    ),
    # https://github.com/crewAIInc/crewAI
    "crewai": (
        _CHAT,
        {"messages": USER, "stop": ["\nObservation:"], "tools": [_STRICT_TOOL], "max_tokens": 32},
    ),
    # https://github.com/open-webui/open-webui
    "open-webui": (
        _CHAT,
        {"messages": USER, **_ANSWER, "session_id": "a", "chat_id": "b", "id": "c"}
        | {"features": {"web_search": False}, "variables": {"{{USER_NAME}}": "u"}},
    ),
    # https://github.com/langgenius/dify
    "dify": (
        _CHAT,
        {"messages": USER, "stream": True, "user": "u", "stop": [], "max_tokens": 4}
        | {"enable_thinking": False},
    ),
    # https://github.com/home-assistant/core
    "home-assistant": (
        "/v1/responses",
        {"input": _INPUT, "instructions": "Be brief.", "max_output_tokens": 8, "user": "u"}
        | {"store": False, "stream": True, "top_p": 1.0, "temperature": 1.0, "service_tier": "auto"}
        | {"prompt_cache_retention": "24h", "safety_identifier": "u"},
    ),
    # https://openrouter.ai/docs
    "openrouter-sdk": (
        _CHAT,
        {"messages": USER, "max_tokens": 4, "models": ["m"], "provider": {"sort": "price"}}
        | {"transforms": [], "usage": {"include": True}, "trace": {"trace_id": "a"}, "route": None}
        | {"reasoning": {"effort": "low"}, "session_id": "a"},
    ),
    # https://github.com/vllm-project/guidellm
    "guidellm": (
        "/v1/completions",
        {"prompt": "copy ab", "max_tokens": 4, "max_completion_tokens": 4, "stop": None}
        | {"ignore_eos": True, "stream": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    # https://github.com/ai-dynamo/aiperf
    "aiperf": (
        _CHAT,
        {"messages": USER, "max_completion_tokens": 4, "min_tokens": 4, "ignore_eos": True}
        | {"temperature": 0, **_ANSWER},
    ),
    # https://github.com/EleutherAI/lm-evaluation-harness
    "lm-eval": (
        "/v1/completions",
        {"prompt": [[99, 111, 112]], "max_tokens": 4, "temperature": 0, "stop": ["\n"], "seed": 1},
    ),
    "old-vllm-client": (
        _CHAT,
        {"messages": USER, "max_tokens": 4, "guided_json": SCHEMA, "guided_choice": None}
        | {"best_of": 1, "min_tokens": 0, "early_stopping": False, "prompt_logprobs": None},
    ),
    "prefill": (_CHAT, {"max_tokens": 4, "echo": True, **CONTINUED}),
}
_ENDS = "an output ends where its constraint is satisfied, and nowhere else"
_UNREAD = "a prompt token is read together with those after it, so it has no probability"
# Why the treatment of a field differs: of all its values, or of one.
REASONS: Mapping[str, str] = {
    'bad_words: ["copy ab"]': "positions decided in the same step cannot see each other",
    "echo": f"{_UNREAD}: a chat's echo comes without, and of completions `logprobs` is refused",
    "prompt_logprobs": _UNREAD,
    "structured_outputs": f"with ignore_eos: {_ENDS}; or beside a required call, too, and not kept",
    f"tool_choice: {json.dumps(ALLOWED)}": "vLLM would not require the call",
    "use_beam_search: true": "a canvas is not written from its beginning",
    'response_format: {"type": "json_object"}': f"with ignore_eos; {_ENDS}",
    f"response_format: {json.dumps(FORMAT)}": f"with ignore_eos, or 4 tokens only; {_ENDS}",
    f"text: {json.dumps({'format': FLAT_FORMAT})}": f"with ignore_eos; {_ENDS}",
    f"output_config: {json.dumps(SAID)}": f"with 4 tokens only; {_ENDS}",
    f"messages: {json.dumps(PREFILLED)}": "a last text goes on, as in Anthropic's own API",
    f"messages: {json.dumps(PREFILLED_PART)}": "a last text goes on, as in Anthropic's own API",
}


class Reply(NamedTuple):
    """The status of an answer, and its form; of a refusal, what it says."""

    status: int
    form: Any = None
    error: str = ""

    def __str__(self) -> str:
        return f"{self.status} {self.error.splitlines()[0][:150]}" if self.error else "200"


class Row(NamedTuple):
    """How a field is treated by vLLM, with another model, and by this package."""

    where: str
    given: Fields
    plain: Reply
    ours: Reply

    @property
    def alike(self) -> bool:
        return self.plain[:2] == self.ours[:2]

    @property
    def reason(self) -> str | None:
        """The key of the reason why the treatment differs; None if there is none."""
        field = self.where.rpartition(".")[2]
        value = self.given.get(field, self.given.get("sampling_params", {}).get(field))
        keys = (f"{field}: {json.dumps(value)}", field)
        return next((key for key in keys if key in REASONS), None)

    def __str__(self) -> str:
        why = "" if self.alike else REASONS.get(self.reason or "", "NO REASON")
        given = json.dumps(self.given)[:90]
        return f"| {self.where} | {given} | {self.plain} | {self.ours} | {why} |"


# What the model says decides about these.
_TEXTS = {"content", "text", "tool_calls", "reasoning", "output", "finish_reason", "stop_reason"}
_TEXTS |= {"top_logprobs", "status", "incomplete_details"}


def form(value: Any, counts: bool, key: str = "") -> Any:
    """An answer without what differs from model to model, and from request to request.

    Args:
        value: the answer, or a part of it.
        counts: whether all answers to the request have the same number of tokens.
        key: the name of the part.
    """
    if isinstance(value, dict):
        # vLLM leaves out some fields that are null.
        kept = {name for name, one in value.items() if one is not None} - _TEXTS
        return {name: form(value[name], counts, name) for name in sorted(kept)}
    if isinstance(value, list):
        return [form(one, counts) for one in value[:1]] + [len(value) if counts else 0]
    same = key in ("prompt_tokens", "input_tokens") or (counts and key.endswith("_tokens"))
    return value if same else type(value).__name__


def ask(server: Server, path: str, body: Fields) -> Reply:
    response = server.post(path, **body)
    if response.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in response.text, response.text
        return Reply(response.status_code, "stream")
    found = response.json()
    if response.status_code != 200:
        return Reply(response.status_code, error=found["error"]["message"])
    if path.endswith("/render"):  # with each model's own default parameters
        return Reply(200, "rendered")
    parameters = body.get("sampling_params", body)
    return Reply(200, form(found, bool(parameters.get("ignore_eos"))))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A causal model without this package: the tokenizer and the template of tiny LLaDA2."""
    path = tmp_path_factory.mktemp("plain")
    write_tiny_llama(path, 272, 512, eos_token_id=257)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_LLADA2 / name, path)
    flags = (*TOOLS, "hermes", "--enable-scale-out")
    with Server(path, *flags, log=path / "log", env={"VLLM_PLUGINS": ""}) as running:
        yield running


@pytest.fixture
def pair(plain: Server, llada2: Server) -> tuple[Server, Server]:
    return plain, llada2


# What is sent: the path, its name in the table, the whole request, and the part that is looked at.
Probe = tuple[str, str, Fields, Fields]


def compared(pair: tuple[Server, Server], sent: Iterable[Probe]) -> list[Row]:
    """Ask both servers, several requests at a time: no answer depends on who else is served."""

    def one(probe: Probe) -> Row:
        path, where, body, given = probe
        plain, ours = (ask(server, path, body) for server in pair)
        return Row(where, given, plain, ours)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, sent))


def probes(endpoint: Endpoint) -> Iterator[tuple[str, Fields]]:
    """The fields of an endpoint's requests, each with what is sent."""
    for field in sorted(endpoint.known):
        above, _, last = field.rpartition(".")
        for value in VALUES[last]:
            given = {last: value}
            yield field, {above: endpoint.body[above] | given} if above else given
    for given in _ONE.get(endpoint.name, ()):
        yield next(iter(given)), given


def test_each_field_of_each_request(pair: tuple[Server, Server]) -> None:
    for endpoint in ENDPOINTS:
        new = {field.rpartition(".")[2] for field in endpoint.known} - VALUES.keys()
        assert not new, f"{endpoint.name} has fields that are not compared: {new}"
    sent = [
        (endpoint.path, f"{endpoint.name}.{field}", endpoint.body | given, given)
        for endpoint in ENDPOINTS
        for field, given in probes(endpoint)
    ]
    sent += [(path, path, body, body) for path, bodies in _RENDERED.items() for body in bodies]
    rows = compared(pair, sent)
    print("\n| field | given | plain vLLM | ours | why they differ |\n|---|---|---|---|---|")
    print(*rows, sep="\n")
    differing = [row for row in rows if not row.alike]
    unexplained = [row for row in differing if row.reason is None]
    assert not unexplained, [(str(row), row.plain.form, row.ours.form) for row in unexplained]
    # No reason is left of what has changed since, and a refusal names what was sent.
    assert {row.reason for row in differing} == REASONS.keys()
    for row in differing:
        if row.ours.status != 200:
            assert row.where.rpartition(".")[2] in row.ours.error, str(row)


def test_fields_of_other_endpoints(pair: tuple[Server, Server]) -> None:
    """VLLM passes over them, and over those that nobody knows, whatever their values."""
    sent = []
    for endpoint in ENDPOINTS:
        known = {*endpoint.known}
        if endpoint.name == "BatchChatCompletionRequest":  # of which vLLM makes requests of chats
            known |= next(one for one in ENDPOINTS if one.name == "ChatCompletionRequest").known
        others = {name: values[0] for name, values in VALUES.items() if name not in known}
        for refused in ("media_io_kwargs", "mm_processor_kwargs"):  # by vLLM, at every endpoint
            others.pop(refused, None)
        if endpoint.path == "/tokenize":  # by which vLLM tells its two classes
            others = {
                name: one for name, one in others.items() if name not in ("prompt", "messages")
            }
        others |= {"of_nobody": 1, "guided_regex": "a+", "extra_body": {"top_k": 5}}
        others |= {"trace": {"id": 1}}
        sent.append((endpoint.path, endpoint.name, endpoint.body | others, others))
    for row in compared(pair, sent):
        assert row.plain.status == 200 and row.alike, str(row)


def test_requests_of_clients(pair: tuple[Server, Server]) -> None:
    sent = [(path, name, body, body) for name, (path, body) in CLIENTS.items()]
    rows = compared(pair, sent)
    print("", *rows, sep="\n")
    for row in rows:
        assert row.plain.status == row.ours.status == 200, str(row)
        # See REASONS["echo"].
        assert row.alike or row.where == "prefill", str(row)
