"""Every tool parser of vLLM: its requests are constrained, or calls are refused by its name."""

from __future__ import annotations

import json
import re
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import vllm
from canvas_grammar.automaton.compilation import compile_constraint
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.constraint import Constraint
from canvas_grammar.grammar.marks import Marks
from canvas_grammar.grammar.structural_tag import structural_tag
from canvas_grammar.limits import CompileLimits, ConstraintError
from canvas_grammar_support.helpers import LIMITS, record
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.parser_manager import ParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from examples.tiny.tokens import byte_level
from vllm_dllm.frontend.tool_calls import check_parser, constrained_calls
from vllm_dllm.vllm_seams.http_endpoints import follow_parameters

# VLLM has no structural tag for these, and reads no JSON.
REFUSED = {
    "dots", "inkling", "k2_horizon", "minimax_m3", "mistral", "muse", "muse_glimmer",
    "musespark1x", "poolside_v1",
}  # fmt: skip
# Not for checkpoints of this kind: other packages, metadata of the tokenizer, gpt-oss alone.
OTHERS = {"beam", "cohere_command3", "cohere_command4", "hf", "openai"}
# What vLLM's servers pass where the option --tool-strict-level is not given.
NOT_GIVEN = signature(ParserManager.get_parser).parameters["tool_strict_level"].default
TOOL = {
    "name": "f",
    "parameters": record(city={"type": "string"}, days={"type": "integer"})
    | {"additionalProperties": False},
}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(autouse=True)
def _as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["vllm"])
    monkeypatch.setattr(ToolParser, "default_tool_strict_level", None)
    # Other tests of this process may have loaded vLLM's own.
    monkeypatch.delitem(ToolParserManager.tool_parsers, "gemma4", raising=False)
    follow_parameters()


@cache
def tokenizer() -> Any:
    """Bytes, and all markers that vLLM's parsers look for as special tokens."""
    marker = re.compile(r"""['"](<[^'"\s<>{}\\]{1,40}>|\[[A-Z_]+\])['"]""")
    places = (Path(vllm.__file__).parent / room for room in ("parser", "reasoning", "tool_parsers"))
    files = (path.read_text() for place in places for path in place.rglob("*.py"))
    found = sorted({text for file in files for text in marker.findall(file)} - {"<eos>"})
    assert len(found) > 60
    backend = byte_level(("<eos>", *found, "\uff5cDSML\uff5c"), first=256)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def adjusted(parser: str, choice: Any, level: Any = NOT_GIVEN, **fields: Any) -> Any:
    """A request as vLLM's server changes it."""
    made = ParserManager.get_parser(parser, enable_auto_tools=True, tool_strict_level=level)
    tools = [{"type": "function", "function": TOOL | fields}]
    body = {"messages": [], "tools": tools, "tool_choice": choice}
    request = ChatCompletionRequest.model_validate(body)
    return made(tokenizer(), request.tools).adjust_request(request)


def parsers() -> list[str]:
    return sorted(set(ToolParserManager.list_registered()) - OTHERS)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("parser", parsers())
def test_calls_are_followed_or_refused(parser: str, choice: Any) -> None:
    request = adjusted(parser, choice)
    if choice != "auto" and parser in REFUSED:
        with pytest.raises(VLLMValidationError, match="--tool-call-parser"):
            constrained_calls(request, request.structured_outputs)
        return
    found = constrained_calls(request, request.structured_outputs)
    if found is None:
        assert choice == "auto"
    elif found.structural_tag is not None:
        marks = Marks({}, ())
        assert not structural_tag(json.loads(found.structural_tag), LIMITS, marks).empty
    else:
        assert found.json is not None and choice != "auto"


def test_who_cannot_require_calls_is_named(package_log: pytest.LogCaptureFixture) -> None:
    for parser in parsers():
        package_log.clear()
        check_parser(parser)
        assert (f"--tool-call-parser {parser}: " in package_log.text) == (parser in REFUSED)


@pytest.mark.parametrize("parser", ["qwen3_coder", "hermes", "glm47", "deepseek_v41", "kimi_k2"])
def test_markers_are_tokens(parser: str) -> None:
    """A required call takes fewer tokens than letters, and free text may hold any token."""
    request = adjusted(parser, "required")
    backend = tokenizer().backend_tokenizer.to_str()
    size, end = len(tokenizer()), tokenizer().eos_token_id
    spelled = Vocabulary.from_tokens(
        [b"", *(bytes([n]) for n in range(1, 256)), *[b""] * (size - 256)], [end]
    )
    assert not request.skip_special_tokens
    found = constrained_calls(request, request.structured_outputs)
    assert found is not None
    constraint = Constraint("structural_tag", found.structural_tag)
    with_tokens = compile_constraint(constraint, Vocabulary.read(backend, size, [end]), LIMITS)
    letters = compile_constraint(constraint, spelled, CompileLimits())
    assert with_tokens.minimum < letters.minimum - 10


@pytest.mark.parametrize("parser", ["qwen3_coder", "hermes", "mimo", "gemma4"])
@pytest.mark.parametrize("option", ["--tool-strict-level", "--tool_strict_level=auto"])
def test_the_level_auto_is_vllm_s_own(
    parser: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adjusted(parser, "auto").structured_outputs is not None
    monkeypatch.setattr("sys.argv", ["vllm", "serve", option, "auto"])
    monkeypatch.setattr(ToolParser, "default_tool_strict_level", None)
    follow_parameters()
    assert adjusted(parser, "auto", "auto").structured_outputs is None
    assert adjusted(parser, "auto", "auto", strict=True).structured_outputs is not None
    assert adjusted(parser, "required", "auto").structured_outputs is not None


def test_gpt_oss_has_a_tag_that_is_not_supported() -> None:
    """With optional calls its requests are not constrained, see `StructuredOutput.drop`."""
    request = adjusted("openai", "auto")
    found = constrained_calls(request, request.structured_outputs)
    assert found is not None
    with pytest.raises(ConstraintError, match="needs an end"):
        structural_tag(json.loads(found.structural_tag), LIMITS)


def test_a_name_that_gemma_cannot_write() -> None:
    request = adjusted("gemma4", "auto", name="a b")
    assert constrained_calls(request, request.structured_outputs) is None
    for fields in ({"strict": True}, {}):
        request = adjusted("gemma4", "auto" if fields else "required", name="a b", **fields)
        with pytest.raises(VLLMValidationError, match="the name of a tool"):
            constrained_calls(request, request.structured_outputs)
