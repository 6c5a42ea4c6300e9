"""Every parser of vLLM makes of deltas of any size what it makes of single tokens."""

from __future__ import annotations

from itertools import repeat

import pytest
from transformers import ByT5Tokenizer
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.responses.streaming_events import split_delta
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from tests.support.checkpoints import ROOT
from tests.support.parser_formats import (
    FAULTS,
    IMPOSSIBLE,
    NOT_TRIED,
    REASONING,
    TOOLS,
    parser_table,
)
from tests.support.parser_replay import (
    NEVER,
    SIZES,
    Case,
    Stop,
    Subject,
    added_up,
    messages,
    one_by_one,
    stop_within,
    streamed,
    subjects,
)
from vllm_dllm.frontend.one_token_deltas import joined, one_token_at_a_time, split_open_call_first

PAGE = ROOT / "docs" / "agents.md"
# Which texts the quick form takes: others for each parser, so that each kind is taken often.
QUICK = {subject: range(3 * number, 3 * number + 3) for number, subject in enumerate(subjects())}


def test_every_parser_of_vllm_is_tried_or_named() -> None:
    names = {*ReasoningParserManager.list_registered(), *ToolParserManager.list_registered()}
    assert names - {*NOT_TRIED} == {*REASONING, *TOOLS, *IMPOSSIBLE}
    assert {*FAULTS} <= {(subject.reasoning, subject.tools) for subject in subjects()}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_tried_cannot_be_used(name: str) -> None:
    is_reasoning = name in ReasoningParserManager.list_registered()
    any_other = Subject("qwen3", "hermes")
    with pytest.raises((ImportError, NotImplementedError)):
        parser = ParserManager.get_parser(
            reasoning_parser_name=name if is_reasoning else None,
            tool_parser_name=None if is_reasoning else name,
            enable_auto_tools=True,
        )
        assert parser is not None
        any_other.made(parser, any_other.request).parse("a", any_other.request, True)


@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_deltas_of_any_size(subject: Subject) -> None:
    """The quick form: a few texts, each in deltas of two sizes, one with a stop string."""
    parser = one_token_at_a_time(subject.parser)
    for seed in QUICK[subject]:
        case = Case(subject, seed)
        sizes = [(2, 4, 32, 256, 0)[(seed + more) % 5] for more in range(2)]
        stop = case.random.choice((NEVER, stop_within(case.random, case.text.text)))
        assert [*case.differences(sizes[:1], Stop(), parser)] == []
        assert [*case.differences(sizes[1:], stop, parser)] == []
        streams, unstreamed = case.faults()
        assert (streams, unstreamed) <= (subject.fault.streamed, subject.fault.unstreamed)


@pytest.mark.long
@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_deltas_of_every_size(subject: Subject) -> None:
    """The long form: 200 texts for each parser, and 60 where both are used."""
    parser = one_token_at_a_time(subject.parser)
    texts = 60 if subject.reasoning and subject.tools else 200
    cases = [Case(subject, seed) for seed in range(texts)]
    for case in cases:
        stop = NEVER if case.seed % 4 == 0 else stop_within(case.random, case.text.text)
        for stops in (Stop(), stop):
            assert [*case.differences((*SIZES, 0), stops, parser)] == []
    faults = [any(found) for found in zip(*(case.faults() for case in cases), strict=True)]
    assert faults == [subject.fault.streamed, subject.fault.unstreamed], "and say so in FAULTS"


def test_the_page_says_what_was_found() -> None:
    assert f"\n\n{parser_table()}\n\n" in PAGE.read_text("utf-8")


def test_a_slow_tokenizer() -> None:
    """VLLM's detokenizer for one keeps the prompt among its tokens."""
    subject = Subject(tools="hermes")
    subject.__dict__["tokenizer"] = slow = ByT5Tokenizer(eos_token="</s>")
    slow.add_tokens(["<tool_call>", "</tool_call>"])
    for seed in range(4):
        case = Case(subject, seed)
        parser = one_token_at_a_time(subject.parser)
        assert [*case.differences((1, 4, 32), Stop(), parser)] == []
        assert [*case.differences((1, 4, 32), NEVER, parser)] == []


def test_tokens_that_the_derenderer_shows() -> None:
    """It shows special tokens even if the request hides them."""
    subject = Subject("deepseek_r1")
    subject.tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    case = Case(subject, 0)
    assert subject.request.skip_special_tokens is not False
    subject.request.skip_special_tokens = False
    shown = streamed(subject, case.ids, case.prompt, repeat(32), Stop())
    single = one_by_one(subject, case.prompt, shown)
    subject.request.skip_special_tokens = True
    parser = one_token_at_a_time(subject.parser)
    found = added_up(*messages(subject, parser, case.prompt, shown))
    assert found == added_up(*messages(subject, subject.parser, case.prompt, single))
    assert found.found(case.text)


def test_reasoning_that_is_not_included() -> None:
    subject = Subject("qwen3", "hermes")
    parser = one_token_at_a_time(subject.parser)
    case = Case(subject, 0)
    subject.request.include_reasoning = False
    assert [*case.differences((1, 4, 32, 256), Stop(), parser)] == []
    stream = streamed(subject, case.ids, case.prompt, repeat(256), Stop())
    found = added_up(*messages(subject, parser, case.prompt, stream))
    assert not found.reasoning and found.calls


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "kimi_k3"])
def test_counts_of_reasoning_tokens(name: str) -> None:
    """Some parsers count while they parse."""
    subject = Subject(name)
    case, counts = Case(subject, 0), set()
    for size in SIZES:
        made = subject.made(one_token_at_a_time(subject.parser), subject.request)
        for delta in streamed(subject, case.ids, case.prompt, repeat(size), Stop()):
            made.parse_delta(
                delta.text, delta.ids, subject.request, case.prompt, finished=delta.finished
            )
        counts.add(made.count_reasoning_tokens(case.ids))
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
    calls = [call(0, None, "1}"), call(1, "f", "{"), call(2, "g", "{}")]
    assert whole == DeltaMessage(content="ab", reasoning="c", tool_calls=calls)
    assert joined([]) is None
    # The Responses API would end the call 0 at the text, and have no name for what follows.
    split = split_open_call_first(split_delta)(whole)
    assert split == [
        DeltaMessage(tool_calls=calls[:1]),
        DeltaMessage(reasoning="c"),
        DeltaMessage(content="ab"),
        DeltaMessage(tool_calls=calls[1:2]),
        DeltaMessage(tool_calls=calls[2:]),
    ]
    assert split_open_call_first(split_delta)(DeltaMessage(content="a"))[0].content == "a"


def test_a_call_that_begins_in_two_pieces_is_not_open() -> None:
    """Catches a stream that ended because a call's arguments came before its name."""
    begin = DeltaToolCall(index=0, id="1", type="function", function=DeltaFunctionCall(name="f"))
    more = DeltaToolCall(index=0, function=DeltaFunctionCall(arguments="{"))
    split = split_open_call_first(split_delta)(DeltaMessage(content="a", tool_calls=[begin, more]))
    assert split == [DeltaMessage(content="a"), DeltaMessage(tool_calls=[begin, more])]


def test_the_class_is_still_vllm_s() -> None:
    """Servers ask it for the parsers that it consists of."""
    subject = Subject("qwen3", "hermes")
    ours = one_token_at_a_time(subject.parser)
    assert issubclass(ours, DelegatingParser) and ours.parse is subject.parser.parse
    assert ours.tool_parser_cls is subject.parser.tool_parser_cls
    assert ours.reasoning_parser_cls is subject.parser.reasoning_parser_cls


def test_a_stream_without_text() -> None:
    subject = Subject(tools="hermes")
    made = subject.made(one_token_at_a_time(subject.parser), subject.request)
    assert made.parse_delta("", [], subject.request, [1], finished=False) is None
    assert made.parse_delta("", [], subject.request, [1], finished=True) is None


def test_ids_that_the_tokenizer_does_not_have() -> None:
    """A head has more rows than its tokenizer has tokens; what they write has no text."""
    subject = Subject("qwen3", "hermes")
    parser = one_token_at_a_time(subject.parser)
    for seed in range(4):
        case = Case(subject, seed)
        plain = streamed(subject, case.ids, case.prompt, repeat(32), Stop())
        for place in range(0, 3 * len(case.ids), 3):
            case.ids.insert(place % len(case.ids), len(subject.tokenizer) + place)
        assert [*case.differences((1, 4, 32, 256), Stop(), parser)] == []
        found = streamed(subject, case.ids, case.prompt, repeat(32), Stop())
        assert "".join(delta.text for delta in found) == "".join(delta.text for delta in plain)
