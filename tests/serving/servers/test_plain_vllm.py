"""Each field of a request is treated as vLLM treats it for other models, or a reason says why not.

A causal model without this package and a diffusion model with it get the same requests: each field
of vLLM's classes of OpenAI's, Anthropic's and token requests, and the fields of the others as well.
The answers must have the same status and the same form.
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
STRICT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
STREAMED = {"stream_options": USAGE, "stream": True}
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
    request: str
    body: Fields

    @property
    def name(self) -> str:
        return self.request.rpartition(".")[2]

    @property
    def known(self) -> set[str]:
        module, _, name = self.request.rpartition(".")
        request = getattr(import_module(f"vllm.entrypoints.{module}"), name)
        nested = SamplingParams.__struct_fields__ if name == "GenerateRequest" else ()
        parameters = {f"sampling_params.{name}" for name in nested if not name.startswith("_")}
        return {*request.model_fields} | parameters


# Greedy answers of fixed length: their numbers of tokens do not depend on the model.
FIXED = {"temperature": 0, "ignore_eos": True}
PROMPT, CHAT = {"prompt": "copy ab"}, {"messages": USER}
GREEDY = {"max_tokens": 4, "temperature": 0}
GENERATE = {"token_ids": [99, 111], "sampling_params": {"max_tokens": 4, **FIXED}}
SCORING = {"query": "copy ab", "items": ["a", "b"], "label_token_ids": [97, 98]}
BATCH = {"messages": [USER, USER], **GREEDY}
_ANTHROPIC, _CHATS = "anthropic.protocol", "openai.chat_completion.protocol"
ENDPOINTS = tuple(
    Endpoint(*each)
    for each in (
        (
            "/v1/completions",
            "openai.completion.protocol.CompletionRequest",
            PROMPT | GREEDY | FIXED,
        ),
        ("/v1/chat/completions", f"{_CHATS}.ChatCompletionRequest", CHAT | GREEDY | FIXED),
        ("/v1/chat/completions/batch", f"{_CHATS}.BatchChatCompletionRequest", BATCH),
        (
            "/v1/responses",
            "openai.responses.protocol.ResponsesRequest",
            {"input": "copy ab", "max_output_tokens": 4, **FIXED},
        ),
        ("/v1/messages", f"{_ANTHROPIC}.AnthropicMessagesRequest", CHAT | GREEDY),
        (
            "/inference/v1/generate",
            "scale_out.token_in_token_out.protocol.GenerateRequest",
            GENERATE,
        ),
        (
            "/generative_scoring",
            "generate.generative_scoring.serving.GenerativeScoringRequest",
            SCORING,
        ),
        ("/v1/messages/count_tokens", f"{_ANTHROPIC}.AnthropicCountTokensRequest", CHAT),
    )
)


def alike(values: list[Any], names: str) -> dict[str, list[Any]]:
    return dict.fromkeys(names.split(), values)


# Values for each field, wherever it belongs.
VALUES: Mapping[str, list[Any]] = {
    **alike(
        [True],
        """
        add_special_tokens early_stopping echo enable_response_messages flat_logprobs ignore_eos
        include_stop_str_in_output item_first joint reasoning_ended return_prompt_text
        return_token_ids return_token_offsets return_token_strs return_tokens_as_token_ids
        return_weight_versions skip_clone skip_reading_prefix_cache
        """,
    ),
    **alike(
        [False],
        """
        background continue_final_message include_reasoning parallel_tool_calls return_mm_kwargs
        skip_special_tokens spaces_between_special_tokens watermarking
        """,
    ),
    **alike(
        [False, True], "add_generation_prompt apply_softmax detokenize store stream use_beam_search"
    ),
    **alike([None], "features parse_context stream_options token_offsets"),
    **alike(
        ["a"],
        """
        cache_salt instructions prompt_cache_key request_id safety_identifier session_id suffix user
        """,
    ),
    **alike([0], "output_text_buffer_length routed_experts_prompt_start"),
    **alike([1], "best_of logprobs prompt_logprob_start"),
    **alike([2], "max_tool_calls min_tokens output_kind stream_interval top_logprobs"),
    **alike([3], "max_completion_tokens max_output_tokens max_tokens truncate_prompt_tokens"),
    **alike([0.5], "frequency_penalty presence_penalty"),
    **alike([[]], "content_parts previous_input_messages"),
    **alike([{"a": 1}], "ec_transfer_params kv_transfer_params"),
    **alike([{"session_id": "a"}, {"of_nobody": 1}], "extra_args vllm_xargs"),
    "allowed_token_ids": [[97, 98]],
    "bad_words": [["a"], ["copy ab"]],
    "chat_template": ["x{{ messages[0].content }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "documents": [[{"title": "a", "text": "b"}]],
    "guided_decoding_backend": ["xgrammar"],
    "include": [["reasoning.encrypted_content"], ["message.output_text.logprobs"]],
    "input": [[{"role": "user", "content": [{"type": "input_text", "text": "copy ab"}]}]],
    "items": [["a"], [[97], [98, 99]]],
    "label_token_ids": [[97], [10**6]],
    "length_penalty": [1.5],
    "logit_bias": [{"97": 5.0}],
    "logprob_token_ids": [[97, 98]],
    "media_io_kwargs": [{"image": {}}],
    "messages": [USER, PREFILLED, []],
    "metadata": [{"user_id": "u"}],
    "min_p": [0.1],
    "mm_payload": ["none"],
    "mm_processor_kwargs": [{}],
    "model": ["m", "another"],
    "n": [1, 2],
    "output_config": [{"effort": "low"}, SAID],
    "output_mode": ["text"],
    "previous_response_id": ["resp_of_nobody"],
    "priority": [0, 1],
    "prompt": ["copy ab", [[99, 111]], ["a", "b"]],
    "prompt_cache_options": [{"ttl": "1h"}],
    "prompt_cache_retention": ["24h"],
    "prompt_embeds": ["AAAA"],
    "prompt_logprob_token_ids": [[[97]]],
    "prompt_logprobs": [0, 1],
    "query": ["copy", [99, 111]],
    "reasoning": [{"effort": "low", "summary": "auto"}],
    "reasoning_effort": ["low"],
    "reasoning_parser_kwargs": [{"chat_template_kwargs": {}}],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 4, "min_pattern_size": 1}],
    "repetition_penalty": [1.1],
    "response_format": [{"type": "text"}, {"type": "json_object"}, FORMAT],
    "sampling_params": [{"max_tokens": 3, **FIXED}],
    "seed": [7],
    "service_tier": ["auto", "default"],
    "stop": ["zz", ["zz", "\n"]],
    "stop_sequences": [["zz"]],
    "stop_token_ids": [[98]],
    "structured_outputs": [{"regex": "a+"}],
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
    "tool_choice": ["none"],
    "tools": [[TOOL]],
    "top_k": [5],
    "top_p": [0.9],
    "trace_decode_token_ids": [[97, 98, 99, 100]],
    "truncation": ["auto", "disabled"],
    "truncation_side": ["left"],
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
        {"structured_outputs": REGEX, "tool_choice": NAMED, "tools": [TOOL], **CALLED},
        {"response_format": FORMAT, "tool_choice": "required", "tools": [TOOL], **CALLED},
        *({"response_format": one, **CALLED} for one in ({"type": "json_object"}, FORMAT)),
        {"structured_outputs": REGEX, **CALLED},
        {"stop": ["zz"], "response_format": FORMAT, **CALLED},
        {"stop": ["zz"], "tools": [STRICT_TOOL], **CALLED},
        STREAMED,
    ],
    "CompletionRequest": [
        STREAMED,
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
    status: int
    form: Any = None
    error: str = ""


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


# What the model says decides about these.
_TEXTS = {"content", "text", "tool_calls", "reasoning", "output", "finish_reason", "stop_reason"}
_TEXTS |= {"top_logprobs", "status", "incomplete_details"}


def form(value: Any, counts: bool, key: str = "") -> Any:
    """An answer without what differs from model to model, and from request to request.

    With `counts`, all answers to the request have the same number of tokens.
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
    rows = compared(pair, sent)
    differing = [row for row in rows if not row.alike]
    assert [row for row in differing if row.reason is None] == []
    # No reason is left of what has changed since, and a refusal names what was sent.
    assert {row.reason for row in differing} == REASONS.keys()
    for row in differing:
        if row.ours.status != 200:
            assert row.where.rpartition(".")[2] in row.ours.error, row


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
        others |= {"of_nobody": 1, "guided_regex": "a+", "extra_body": {"top_k": 5}}
        others |= {"trace": {"id": 1}}
        sent.append((endpoint.path, endpoint.name, endpoint.body | others, others))
    for row in compared(pair, sent):
        assert row.plain.status == 200 and row.alike, row
