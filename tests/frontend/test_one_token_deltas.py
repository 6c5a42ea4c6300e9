"""Deltas of any size become what vLLM's parsers make of single tokens.

A text is replayed through vLLM's detokenizer and its parsers, without an engine. Each text shows a
kind of fault that deltas of several tokens have without this package. What single tokens give in
the format of each parser of vLLM is in docs/upstream/parsers_of_reasoning_and_calls.md.
"""

# ruff: noqa: RUF001 (the marks of some models have such characters)
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.streaming_events import split_delta
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from tests.support.checkpoints import TINY_GEMMA, TINY_SDAR
from vllm_dllm.frontend.one_token_deltas import joined, one_token_at_a_time, split_open_call_first

SIZES = (2, 4, 32, 256)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in "fg"
]
THOUGHT = "<think>\nhm é 東\n</think>\n\n"
HERMES = '<tool_call>\n{"name": "NAME", "arguments": {"city": "São 😀"}}\n</tool_call>\n'
CITY = "<parameter=city>\nSão 😀\n</parameter>\n"
CODER = f"<tool_call>\n<function=NAME>\n{CITY}</function>\n</tool_call>"
GEMMA = '<|tool_call>call:NAME{city:<|"|>São 😀<|"|>}<tool_call|>'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
DEEPSEEK_CALL = (
    f'{DEEPSEEK[2]}function{DEEPSEEK[4]}NAME\n```json\n{{"city": "São 😀"}}\n```{DEEPSEEK[3]}\n'
)
LLAMA = '{"name": "f", "parameters": {"city": "São"}}; {"name": "g", "parameters": {"city": "é"}}'


def calls(form: str, names: str) -> str:
    return "".join(form.replace("NAME", name) for name in names)


@dataclass
class Answer:
    """An answer, and the names of vLLM's parsers that read it.

    `marks` are tokens that the tokenizer, Gemma's or SDAR's, has beside its own.
    """

    reasoning: str | None
    tools: str | None
    text: str
    marks: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    gemma: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        found = AutoTokenizer.from_pretrained(TINY_GEMMA if self.gemma else TINY_SDAR)
        found.add_tokens([*self.marks])
        return found

    @cached_property
    def parser(self) -> type[Parser]:
        """VLLM's own class, also where a test of this process has wrapped what finds it."""
        get_parser = ParserManager.get_parser.__func__
        found = getattr(get_parser, "__wrapped__", get_parser)(
            ParserManager,
            tool_parser_name=self.tools,
            reasoning_parser_name=self.reasoning,
            enable_auto_tools=self.tools is not None,
            tokenizer=self.tokenizer,
        )
        assert found is not None
        return found

    @cached_property
    def request(self) -> ChatCompletionRequest:
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": "a"}],
            stream=True,
            **({"tools": FUNCTIONS, "tool_choice": "auto"} if self.tools else {}),
            **self.options,
        )
        adjusted = self.made(self.parser, request).adjust_request(request)
        assert isinstance(adjusted, ChatCompletionRequest)
        return adjusted

    def made(self, parser: type[Parser], request: ChatCompletionRequest) -> Parser:
        return parser(self.tokenizer, request.tools, chat_template_kwargs={"enable_thinking": True})

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class Delta(NamedTuple):
    text: str
    ids: list[int]
    finished: bool


def streamed(answer: Answer, ids: Sequence[int], size: int, stop: Sequence[str]) -> list[Delta]:
    """Pass tokens through vLLM's output processor, which makes their text and stops."""
    params = SamplingParams(
        stop=[*stop],
        skip_special_tokens=answer.request.skip_special_tokens is not False,
        spaces_between_special_tokens=answer.request.spaces_between_special_tokens,
        output_kind=RequestOutputKind.DELTA,
    )
    request = EngineCoreRequest(
        request_id="0",
        external_req_id="0",
        prompt_token_ids=answer.encode("a"),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    processor = OutputProcessor(answer.tokenizer, log_stats=False)
    processor.add_request(request, None)
    found: list[Delta] = []
    for position in range(0, len(ids), size):
        reason = FinishReason.LENGTH if position + size >= len(ids) else None
        output = EngineCoreOutput("0", [*ids[position : position + size]], finish_reason=reason)
        [result] = processor.process_outputs([output]).request_outputs
        [part] = result.outputs
        found.append(Delta(part.text, [*part.token_ids], part.finish_reason is not None))
        if found[-1].finished:
            break
    return found


def one_by_one(answer: Answer, stream: Sequence[Delta]) -> Iterator[Delta]:
    left = "".join(delta.text for delta in stream)
    for delta in streamed(answer, [token for part in stream for token in part.ids], 1, ()):
        yield Delta(left[: len(delta.text)], delta.ids, delta.finished)
        left = left[len(delta.text) :]


def parsed(
    answer: Answer, parser: type[Parser], stream: Sequence[Delta] | Iterator[Delta]
) -> list[DeltaMessage]:
    made, prompt = answer.made(parser, answer.request), answer.encode("a")
    parts = (
        made.parse_delta(text, ids, answer.request, prompt, finished=finished)
        for text, ids, finished in stream
    )
    return [part for part in parts if part is not None]


class Told(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def chat(parts: Sequence[DeltaMessage]) -> Told:
    found: dict[int, list[str]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        whole = found.setdefault(call.index, ["", ""])
        if call.function is not None:
            whole[0] += call.function.name or ""
            whole[1] += call.function.arguments or ""
    return Told(
        "".join(part.reasoning or "" for part in parts),
        "".join(part.content or "" for part in parts),
        [(name, values) for _, (name, values) in sorted(found.items())],
    )


# ---- a text for each kind of fault

ANSWERS = {
    "the end of a thought, and a text": Answer("deepseek_r1", None, f"{THOUGHT}a é b"),
    "a thought, a text and calls": Answer(
        "qwen3", "hermes", f"{THOUGHT}so: {calls(HERMES, 'fg')}and {calls(HERMES, 'f')}"
    ),
    "arguments between tags": Answer("qwen3", "qwen3_coder", THOUGHT + "so: " + calls(CODER, "fg")),
    "a call that is cut short": Answer(None, "hermes", f"so: {calls(HERMES, 'fg')}"[:-30]),
    "several thoughts": Answer("nemotron_v3", None, f"a<think>b {THOUGHT}c<think>d</think>e"),
    "calls within one delta": Answer(
        None,
        "deepseek_v3",
        f"so: {DEEPSEEK[0]}{calls(DEEPSEEK_CALL, 'fg')}{DEEPSEEK[1]}",
        marks=DEEPSEEK,
    ),
    "calls without ends": Answer(
        None, "llama3_json", f"<|python_tag|>{LLAMA}", marks=("<|python_tag|>",)
    ),
    "Gemma's notation": Answer(
        "gemma4",
        "gemma4",
        f"<|channel>thought\nhm é<channel|>so: {calls(GEMMA, 'fg')}",
        marks=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        gemma=True,
    ),
    "a stop string in a text": Answer("qwen3", "hermes", f"{THOUGHT}so: well", stop=("we", "zz")),
    "a stop string in a call": Answer(
        "qwen3", "hermes", THOUGHT + calls(HERMES, "f"), stop=("São", "never")
    ),
    "text that is held back": Answer(
        "qwen3", "hermes", THOUGHT + calls(HERMES, "f"), stop=("never written!",)
    ),
    "a thought that is not included": Answer(
        "qwen3", "hermes", THOUGHT + calls(HERMES, "f"), options={"include_reasoning": False}
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_deltas_of_any_size(kind: str) -> None:
    """As chats; `tests/serving/servers/test_agent_streams.py` asks the other APIs as well."""
    answer = ANSWERS[kind]
    ours, ids = one_token_at_a_time(answer.parser), answer.encode(answer.text)
    for size in SIZES:
        stream = streamed(answer, ids, size, answer.stop)
        wanted = parsed(answer, answer.parser, one_by_one(answer, stream))
        assert chat(parsed(answer, ours, stream)) == chat(wanted), size


def test_a_slow_tokenizer() -> None:
    """VLLM's detokenizer for one keeps the prompt among its tokens."""
    answer = Answer(None, "hermes", f"so: {calls(HERMES, 'fg')}")
    answer.tokenizer = slow = ByT5Tokenizer(eos_token="</s>")
    slow.add_tokens(["<tool_call>", "</tool_call>"])
    stream = streamed(answer, answer.encode(answer.text), 32, ())
    found = chat(parsed(answer, one_token_at_a_time(answer.parser), stream))
    assert found == chat(parsed(answer, answer.parser, one_by_one(answer, stream)))
    assert len(found.calls) == 2


def test_tokens_that_the_derenderer_shows() -> None:
    """It shows special tokens even if the request hides them."""
    answer = Answer("deepseek_r1", None, f"{THOUGHT}a é b")
    answer.tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    request, ids = answer.request, answer.encode(answer.text)
    request.skip_special_tokens = False
    shown = streamed(answer, ids, 32, ())
    single = [*one_by_one(answer, shown)]
    request.skip_special_tokens = True
    found = chat(parsed(answer, one_token_at_a_time(answer.parser), shown))
    assert found == chat(parsed(answer, answer.parser, single))
    assert found.reasoning.strip() == "hm é 東" and found.content.strip() == "a é b"


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_counts_of_reasoning_tokens(name: str) -> None:
    """Some parsers count while they parse."""
    text, marks = f"{THOUGHT}so", ()
    if name == "gemma4":
        text, marks = "<|channel>thought\nhm é<channel|>so", ("<|channel>", "<channel|>")
    answer, counts = Answer(name, None, text, marks), set()
    ids = answer.encode(text)
    for size in (1, *SIZES):
        made = answer.made(one_token_at_a_time(answer.parser), answer.request)
        for delta in streamed(answer, ids, size, ()):
            made.parse_delta(delta.text, delta.ids, answer.request, [], finished=delta.finished)
        counts.add(made.count_reasoning_tokens(ids))
    assert len(counts) == 1 and counts != {0}


def call(index: int, name: str | None, values: str | None) -> DeltaToolCall:
    function = DeltaFunctionCall(name=name, arguments=values)
    return DeltaToolCall(index=index, id=name and f"id {name}", function=function)


def test_what_is_joined() -> None:
    whole = joined(
        [
            DeltaMessage(tool_calls=[call(0, None, "1}")]),
            DeltaMessage(content="a"),
            DeltaMessage(content="", reasoning="c"),
            DeltaMessage(content="b", tool_calls=[call(1, "f", None)]),
            DeltaMessage(tool_calls=[call(1, None, "{"), call(2, "g", "{}")]),
        ]
    )
    found = [call(0, None, "1}"), call(1, "f", "{"), call(2, "g", "{}")]
    assert whole == DeltaMessage(content="ab", reasoning="c", tool_calls=found)
    assert joined([]) is None
    # The Responses API would end the call 0 at the text, and have no name for what follows.
    split = split_open_call_first(split_delta, whole)
    assert split == [
        DeltaMessage(tool_calls=found[:1]),
        DeltaMessage(reasoning="c"),
        DeltaMessage(content="ab"),
        DeltaMessage(tool_calls=found[1:2]),
        DeltaMessage(tool_calls=found[2:]),
    ]
