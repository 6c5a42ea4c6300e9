"""Replay chosen tokens through vLLM's detokenizer and its parsers, without an engine.

    .venv/bin/python -m tests.support.parser_replay     # faults of vLLM's parsers

Texts are random and in the format of the parser under test (`parser_formats`), and so is the
tokenizer: byte-level pieces learned from such texts, and the format's marks as tokens. A text is
streamed in deltas of several sizes. What must come out is what vLLM's own parser makes of single
tokens, each with its own text.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingEventProcessor,
    split_delta,
)
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from tests.support.parser_formats import (
    FAULTS,
    HUNYUAN,
    REASONING,
    TEMPLATE,
    TOOLS,
    Call,
    Fault,
    Thoughts,
    Tools,
)
from vllm_dllm.frontend.one_token_deltas import split_open_call_first
from vllm_dllm.vllm_seams.versions import vllm_version

SIZES = (1, 2, 4, 32, 256)
END = "<|end of answer|>"
PROMPT = "Two words."
WORDS = ("the weather", "in Paris", "Straße", "é", "東京", "😀", "so:", "a < b", "x > y", "wait,")
WORDS += ("(maybe)", "50%", "line\nbreak")
# Values that no notation would have to escape.
NAMES = ("Paris", "Straße", "東京", "new", "😀", "a", "é b")
TEXT = {"type": "string"}
GUEST = {"name": TEXT, "age": {"type": "integer"}}
PROPERTIES: dict[str, dict[str, Any]] = {
    "city": TEXT,
    "days": {"type": "integer"},
    "price": {"type": "number"},
    "refundable": {"type": "boolean"},
    "guest": {"type": "object", "properties": GUEST},
    "tags": {"type": "array", "items": TEXT},
}
FUNCTIONS = ("get_weather", "book", "f")
PARAMETERS = {"type": "object", "properties": PROPERTIES}
FUNCTION_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in FUNCTIONS
]


def words(random: Random) -> str:
    return " ".join(random.choice(WORDS) for _ in range(random.randint(1, 4)))


def arguments(random: Random, lists: bool) -> dict[str, Any]:
    def name() -> str:
        return " ".join(random.choice(NAMES) for _ in range(2))

    values: dict[str, Callable[[], Any]] = {
        "city": name,
        "days": lambda: random.randrange(-9, 1000),
        "price": lambda: random.randrange(1, 999) + 0.25,
        "refundable": lambda: random.random() < 0.5,
        "guest": lambda: {"name": name(), "age": random.randrange(99)},
        "tags": lambda: [name() for _ in range(random.randint(1, 2))],
    }
    allowed = [one for one in values if lists or one != "tags"]
    return {one: values[one]() for one in random.sample(allowed, random.randint(1, 3))}


@dataclass
class Text:
    """An answer, the end of its prompt, and what was written into it.

    `parts` are the texts that are neither a thought nor a call; None: what must be found is not
    known.
    """

    text: str
    prompt: str = ""
    thought: str = ""
    parts: tuple[str, ...] | None = None
    calls: Sequence[Call] = ()


def thinking(random: Random, form: Thoughts, kind: int) -> Text:
    """A text with thoughts.

    By its kind: 0 a thought and an answer, 1 no thought, 2 an open one, 3 several, 4 no answer, 5
    marks anywhere.
    """

    def answer(text: str) -> str:
        return form.answer[0] + text + form.answer[1]

    thought, text = f"{words(random)} {words(random)}", words(random)
    in_prompt = random.choice(form.begins) == "prompt"
    prompt, begin = (form.begin, "") if in_prompt else ("", form.begin)
    first = begin + thought + form.end
    if kind == 0 and not form.shown:
        return Text(first + answer(text), prompt, parts=(form.begin + first + answer(text),))
    if kind == 0:
        return Text(first + answer(text), prompt, thought, (text,))
    if kind == 1:
        return Text(answer(text), prompt if random.random() < 0.3 else "")
    if kind == 2:
        return Text(begin + thought, prompt)
    if kind == 3:
        later = [answer(words(random)) + form.begin + words(random) + form.end for _ in range(2)]
        return Text(first + "".join(later) + answer(text), prompt)
    if kind == 4:
        return Text(first, prompt, thought)
    pieces = [form.begin, form.end, *form.tokens(), "\n", text, thought]
    return Text("".join(random.choice(pieces) for _ in range(random.randint(3, 12))), prompt)


def calling(random: Random, form: Tools, kind: int) -> Text:
    """A text with calls.

    By its kind: 0 in one place, 1 in two, 2 cut short, 3 no call, 4 in two places whether the
    format has that or not, 5 marks anywhere.
    """

    def around(text: str) -> str:
        return form.text[0] + text + form.text[1] if text else ""

    def perhaps(allowed: bool) -> str:
        return words(random) if allowed and random.random() < 0.6 else ""

    def some(most: int) -> list[Call]:
        number = random.randint(1, most)
        return [(random.choice(FUNCTIONS), arguments(random, form.lists)) for _ in range(number)]

    calls, more = some(form.most), some(1)
    before, between, after = perhaps(form.before), perhaps(form.again), perhaps(form.after)
    whole = around(before) + form.block(calls)
    if kind == 1 and form.again:
        whole += around(between) + form.block(more) + around(after)
        return Text(whole, parts=(before, between, after), calls=calls + more)
    if kind in (0, 1):
        return Text(whole + around(after), parts=(before, after), calls=calls)
    if kind == 2:
        return Text(whole[: random.randrange(len(around(before)) or 1, len(whole))])
    if kind == 3:
        return Text(around(words(random)))
    if kind == 4:
        whole = around(words(random)) + form.block(calls) + around(words(random))
        return Text(whole + form.block(more) + words(random))
    pieces = [*form.markers, form.block(calls), form.block(calls)[:9], words(random), "\n", " "]
    return Text("".join(random.choice(pieces) for _ in range(random.randint(3, 8))))


# The kinds of texts, one after the other.
THINKING = (0, 5, 1, 3, 0, 2, 4)
CALLING = (0, 5, 1, 2, 0, 4, 1, 3)


@dataclass(frozen=True)
class Subject:
    """A reasoning parser, a tool parser, or both."""

    reasoning: str | None = None
    tools: str | None = None

    def __str__(self) -> str:
        return f"{self.reasoning}+{self.tools}"

    @property
    def fault(self) -> Fault:
        return FAULTS.get((self.reasoning, self.tools), Fault("", streamed=False))

    def text(self, seed: int) -> Text:
        """A random text; where both parsers are used it begins with a thought."""
        random = Random(f"{self} {seed}")
        if self.tools is None:
            form = REASONING[self.reasoning or ""]
            return thinking(random, form, THINKING[seed % len(THINKING)])
        text = calling(random, TOOLS[self.tools], CALLING[seed % len(CALLING)])
        if self.reasoning is not None:
            first = thinking(random, REASONING[self.reasoning], 4)
            text.text, text.prompt, text.thought = (
                first.text + text.text,
                first.prompt,
                first.thought,
            )
        return text

    @property
    def options(self) -> dict[str, Any]:
        """The request's ``chat_template_kwargs``; a parser may change what it is given."""
        return dict(REASONING[self.reasoning].options) if self.reasoning else {}

    @functools.cached_property
    def tokenizer(self) -> Any:
        if self.reasoning == "hunyuan_a13b":
            return hunyuan_tokenizer()
        thoughts = REASONING[self.reasoning].tokens() if self.reasoning else ()
        calls = TOOLS[self.tools].markers if self.tools else ()
        texts = [self.text(seed).text for seed in range(24)]
        return learned_tokenizer(texts, dict.fromkeys((*thoughts, *calls)))

    @functools.cached_property
    def parser(self) -> type[Parser]:
        """VLLM's own class."""
        # Another test of this process may have wrapped it.
        get_parser = inspect.unwrap(ParserManager.get_parser.__func__)
        found = get_parser(
            ParserManager,
            tool_parser_name=self.tools,
            reasoning_parser_name=self.reasoning,
            enable_auto_tools=self.tools is not None,
            tokenizer=self.tokenizer,
        )
        assert found is not None
        return found

    @functools.cached_property
    def request(self) -> ChatCompletionRequest:
        """A request as vLLM's handler has it when the answer begins."""
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": PROMPT}],
            stream=True,
            chat_template_kwargs=self.options,
            **({"tools": FUNCTION_TOOLS, "tool_choice": "auto"} if self.tools else {}),
        )
        adjusted = self.made(self.parser, request).adjust_request(request)
        assert isinstance(adjusted, ChatCompletionRequest)
        return adjusted

    def made(self, parser: type[Parser], request: ChatCompletionRequest) -> Parser:
        return parser(self.tokenizer, request.tools, chat_template_kwargs=self.options)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def finished_tokenizer(tokenizer: Tokenizer, markers: Sequence[str]) -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.add_tokens([AddedToken(one, normalized=False, special=False) for one in markers])
    fast.response_template = TEMPLATE
    return fast


def byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def learned_tokenizer(texts: Sequence[str], markers: Any) -> Any:
    tokenizer = byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return finished_tokenizer(tokenizer, list(markers))


def hunyuan_tokenizer() -> Any:
    """A tokenizer with the ids that the parser `hunyuan_a13b` has in its source."""
    vocabulary = {"<th": 14023, "ink": 771, ">Ċ": 397, "Ċ": 198, "</": 524, "think": 27963, "<": 27}
    vocabulary |= {"answer": 9399, ">": 29}
    alphabet = [one for one in pre_tokenizers.ByteLevel.alphabet() if one not in vocabulary]
    free = sorted({*range(28000)} - {*vocabulary.values()})
    vocabulary |= dict(zip(alphabet, free, strict=False))
    vocabulary |= {f"<unused{number}>": number for number in free[len(alphabet) :]}
    fast = finished_tokenizer(byte_level(models.BPE(vocabulary, [])), ())
    plain = fast.encode

    def encode(text: str, **options: Any) -> list[int]:
        for mark, ids in HUNYUAN.items():
            before, found, after = text.partition(mark)
            if found:
                return [*encode(before), *ids, *encode(after)]
        return list(plain(text, add_special_tokens=False))

    fast.encode = encode
    return fast


@dataclass(frozen=True)
class Stop:
    """How a request asks for stop strings."""

    strings: tuple[str, ...] = ()
    include: bool = False


NEVER = Stop(("never written!",))


def stop_within(random: Random, text: str) -> Stop:
    """Stop strings of which the text has one, if possible in its second half."""
    begin = random.randrange(len(text) // 2, len(text))
    found = text[begin : begin + random.randint(1, 6)]
    return Stop((found, *NEVER.strings), random.random() < 0.3) if found.strip() else NEVER


@dataclass
class Delta:
    """What vLLM's serving is given at a time."""

    text: str
    ids: list[int]
    finished: bool


def streamed(
    subject: Subject, ids: Sequence[int], prompt: Sequence[int], sizes: Iterator[int], stop: Stop
) -> list[Delta]:
    """Pass the tokens through vLLM's output processor, which makes their text and stops."""
    params = SamplingParams(
        stop=list(stop.strings),
        include_stop_str_in_output=stop.include,
        skip_special_tokens=subject.request.skip_special_tokens is not False,
        spaces_between_special_tokens=subject.request.spaces_between_special_tokens,
        output_kind=RequestOutputKind.DELTA,
    )
    request = EngineCoreRequest(
        request_id="0",
        external_req_id="0",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    processor = OutputProcessor(subject.tokenizer, log_stats=False)
    processor.add_request(request, None)
    ended = ids[-1] == subject.tokenizer.eos_token_id
    found: list[Delta] = []
    position = 0
    while not (found and found[-1].finished):
        part = list(ids[position : position + next(sizes)])
        position += len(part)
        reason = None
        if position >= len(ids):
            reason = FinishReason.STOP if ended else FinishReason.LENGTH
        output = EngineCoreOutput("0", part, finish_reason=reason)
        [result] = processor.process_outputs([output]).request_outputs
        [answer] = result.outputs
        found.append(Delta(answer.text, list(answer.token_ids), answer.finish_reason is not None))
    return found


def one_by_one(
    subject: Subject, prompt: Sequence[int], stream: list[Delta], include: bool = False
) -> list[Delta]:
    """The same answer in single tokens, each with its own text."""
    ids = [token for delta in stream for token in delta.ids]
    left = "".join(delta.text for delta in stream)
    found = []
    for delta in streamed(subject, ids, prompt, itertools.repeat(1), Stop((), include)):
        text, left = left[: len(delta.text)], left[len(delta.text) :]
        found.append(Delta(text, delta.ids, delta.finished))
    assert not left, left
    return found


@dataclass
class Parsed:
    """What a client has when the answer is complete; a parser's own error is a result."""

    reasoning: str
    content: str
    calls: Sequence[tuple[str, str]]
    error: str = ""

    def found(self, text: Text) -> bool:
        """Whether what was written into the text was found, and nothing else.

        Spaces do not matter, and text after a call may be missing: most models end there.
        """
        if self.error or text.thought.strip() != self.reasoning.strip():
            return False
        first, *rest = ["".join(part.split()) for part in text.parts or ()]
        right = {first + "".join(kept) for kept in itertools.product(*[("", one) for one in rest])}
        if "".join(self.content.split()) not in right:
            return False
        try:
            return [(name, json.loads(values)) for name, values in self.calls] == [*text.calls]
        except json.JSONDecodeError:
            return False

    def same(self, reference: Parsed) -> bool:
        """Whether a client has the same; what comes before an error may be missing."""
        if reference.error:
            return self.error == reference.error
        return self == reference


def messages(
    subject: Subject, parser: type[Parser], prompt: Sequence[int], stream: list[Delta]
) -> tuple[list[DeltaMessage], str]:
    """What the parser makes of a stream, and what it raised."""
    made = subject.made(parser, subject.request)
    found = []
    for delta in stream:
        try:
            message = made.parse_delta(
                delta.text, [*delta.ids], subject.request, [*prompt], finished=delta.finished
            )
        except Exception as error:
            return found, type(error).__name__
        if message is not None:
            found.append(message)
    return found, ""


def added_up(parts: list[DeltaMessage], error: str) -> Parsed:
    """What a client of chat completions adds up."""
    calls: dict[int, list[str]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        whole = calls.setdefault(call.index, ["", ""])
        if call.function is not None:
            whole[0] += call.function.name or ""
            whole[1] += call.function.arguments or ""
    return Parsed(
        "".join(part.reasoning or "" for part in parts),
        "".join(part.content or "" for part in parts),
        [(name, values) for _, (name, values) in sorted(calls.items())],
        error,
    )


def unstreamed(subject: Subject, prompt: Sequence[int], stream: list[Delta]) -> Parsed:
    """What vLLM's parser makes of the whole answer."""
    made = subject.made(subject.parser, subject.request)
    made.set_prompt_token_ids([*prompt])
    reasoning, content, calls = made.parse(
        "".join(delta.text for delta in stream),
        subject.request,
        enable_auto_tools=True,
        model_output_token_ids=[token for delta in stream for token in delta.ids],
    )
    return Parsed(
        reasoning or "", content or "", [(call.name, call.arguments) for call in calls or []]
    )


def responses(parts: list[DeltaMessage], split: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """The thoughts, the texts and the calls that a client of the Responses API has.

    `split` is vLLM's function, wrapped or not.
    """
    processor = SimpleStreamingEventProcessor()
    for part in itertools.chain.from_iterable(map(split, parts)):
        state, call = processor.resolve_target_state(part)
        if state.name == "NONE":
            continue
        if processor.needs_transition(state, call):
            processor.close_current()
            processor.open(state, call)
        processor.emit_delta(part, None, lambda output: [])  # type: ignore[arg-type]
    processor.close_current()
    texts, calls = {"reasoning": "", "message": ""}, []
    for item in processor.output_items:
        if item.type == "function_call":
            calls.append((item.name, item.arguments))
        else:
            texts[item.type] += "".join(part.text for part in item.content or [])  # type: ignore
    return texts["reasoning"], texts["message"], calls


def claude(parts: list[DeltaMessage]) -> tuple[str, str, list[str]]:
    """The thoughts, the texts and the calls that a client of the Messages API has."""

    in_memory = not (vllm_version() or "").startswith("0.32.")  # before that, as they are sent

    async def chunks() -> Any:
        for message in [DeltaMessage(role="assistant", content=""), *parts]:
            choice = ChatCompletionResponseStreamChoice(index=0, delta=message)
            chunk = ChatCompletionStreamResponse(model="m", choices=[choice])
            yield chunk if in_memory else f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        if not in_memory:
            yield "data: [DONE]\n\n"

    async def events() -> list[Any]:
        serving = AnthropicServingMessages.__new__(AnthropicServingMessages)
        converted = AnthropicServingMessages.message_stream_converter(serving, chunks())
        return [json.loads(event.split("data: ", 1)[1]) async for event in converted]

    thoughts, texts, calls = "", "", []
    for event in asyncio.run(events()):
        assert event["type"] != "error", event
        if event["type"] == "content_block_start" and "name" in event["content_block"]:
            calls.append(event["content_block"]["name"])
        delta = event.get("delta") or {}
        thoughts, texts = thoughts + delta.get("thinking", ""), texts + delta.get("text", "")
        if "partial_json" in delta:
            calls[-1] += delta["partial_json"]
    return thoughts, texts, calls


def thinks_after_a_call(parts: list[DeltaMessage]) -> bool:
    called = [bool(part.tool_calls) for part in parts]
    return True in called and any(part.reasoning for part in parts[called.index(True) :])


split_ours = split_open_call_first(split_delta)


@dataclass
class Case:
    """A text of a subject as tokens; what must come out without a stop string, and what did."""

    subject: Subject
    seed: int

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.text = self.subject.text(self.seed)
        self.ids = self.subject.encode(self.text.text)
        if self.seed % 2:
            self.ids.append(self.subject.tokenizer.eos_token_id)
        self.prompt = self.subject.encode(PROMPT + self.text.prompt)

    def sizes(self, size: int) -> Iterator[int]:
        """Deltas of one size; 0: of any."""
        if size:
            return itertools.repeat(size)
        return iter(lambda: self.random.choice((1, 1, 2, 3, 5, 8, 13, 40)), 0)

    def differences(self, sizes: Sequence[int], stop: Stop, parser: type[Parser]) -> Iterator[str]:
        """The sizes of deltas from which a client has something else than from single tokens."""
        reference = None
        for size in sizes:
            stream = streamed(self.subject, self.ids, self.prompt, self.sizes(size), stop)
            if reference is None:
                single = one_by_one(self.subject, self.prompt, stream, stop.include)
                reference = messages(self.subject, self.subject.parser, self.prompt, single)
            found = messages(self.subject, parser, self.prompt, stream)
            if not added_up(*found).same(added_up(*reference)):
                yield f"{self.subject} {self.seed} {size} {stop}: {found} {reference}"
            elif size == sizes[-1] and not reference[1] and parser is not self.subject.parser:
                with contextlib.suppress(ValidationError):  # a call without a name, by vLLM itself
                    right = responses(reference[0], split_delta)
                    if responses(found[0], split_ours) != right:
                        yield f"{self.subject} {self.seed} {size} {stop}: responses"
                if thinks_after_a_call(reference[0]):
                    assert self.subject.tools == "inkling", self.subject
                elif claude(found[0]) != claude(reference[0]):
                    yield f"{self.subject} {self.seed} {size} {stop}: messages"

    def faults(self) -> tuple[bool, bool]:
        """Whether vLLM misses what was written, streamed in single tokens, and unstreamed."""
        if self.text.parts is None:
            return False, False
        single = streamed(self.subject, self.ids, self.prompt, itertools.repeat(1), Stop())
        found = added_up(*messages(self.subject, self.subject.parser, self.prompt, single))
        whole = unstreamed(self.subject, self.prompt, single)
        return not found.found(self.text), not whole.found(self.text)


def subjects() -> list[Subject]:
    """Each parser alone, and each tool parser with the reasoning parser of its models."""
    both = [Subject(form.reasoning, name) for name, form in TOOLS.items() if form.reasoning]
    return [*map(Subject, REASONING), *(Subject(None, name) for name in TOOLS), *both]


def main(texts: int = 200) -> None:
    for subject in subjects():
        cases = [Case(subject, seed) for seed in range(texts)]
        faults = [sum(found) for found in zip(*(case.faults() for case in cases), strict=True)]
        wrong: Counter[int] = Counter()
        for case in cases:
            for size in (*SIZES[1:], 0):
                wrong[size] += any(case.differences([size], Stop(), subject.parser))
        print(subject, "streamed, unstreamed:", *faults, "without us:", dict(wrong), flush=True)


if __name__ == "__main__":
    main()
