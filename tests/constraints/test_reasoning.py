"""Every reasoning parser of vLLM: a constraint begins after its thought, or is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from canvas_grammar import Constraint, ConstraintError, Thought
from canvas_grammar.automaton.compilation import compile_constraint
from canvas_grammar.automaton.configurations import END_OF_TEXT, NO_STATE, START
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar_support.helpers import LIMITS
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams

from tests.constraints.test_constraint_options import structured
from tests.constraints.test_tool_parsers import tokenizer
from vllm_dllm.frontend import Prompt, current
from vllm_dllm.frontend.http_request import HttpRequest
from vllm_dllm.frontend.structured_output import thought_after

# They do not say where a thought ends, or read on differently after that.
REFUSED = {
    "granite", "hunyuan_a13b", "inkling", "minimax_m2_append_think", "muse", "muse_glimmer",
    "musespark1x",
}  # fmt: skip
# They need other tokenizers, or see no thought at all.
OTHERS = {"beam", "hf", "mistral", "olmo3", "openai_gptoss"}
KWARGS = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
THINKING = {"chat_template_kwargs": KWARGS}
ASKED = ChatCompletionRequest.model_validate({"messages": []})


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def parser(name: str) -> Any:
    return ReasoningParserManager.get_reasoning_parser(name)(tokenizer(), **THINKING)


def thought(name: str, prompt: str, ended: bool | None = None) -> Thought | None:
    return thought_after(Prompt(ids(prompt), ended, THINKING), name, tokenizer(), False)


@pytest.mark.parametrize("name", sorted({*ReasoningParserManager.list_registered()} - OTHERS))
def test_a_constraint_begins_after_the_thought(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ConstraintError, match=f"--reasoning-parser {name}, which does not"):
            thought(name, "ask")
        return
    start = parser(name).reasoning_start_str
    found = thought(name, f"ask{start}")
    assert found is not None and found.end == parser(name).reasoning_end_str
    assert thought(name, f"ask{start}abc{found.end}") is None, "the prompt has ended it"
    assert thought(name, f"ask{start}", ended=True) is None
    known = Vocabulary.read(
        tokenizer().backend_tokenizer.to_str(), len(tokenizer()), [tokenizer().eos_token_id]
    )
    constraint = Constraint("regex", "[0-9]+", thought=found)
    automaton = compile_constraint(constraint, known, LIMITS).configurations()

    def allows(text: str) -> bool:
        state = START
        for token in ids(text):
            state = automaton.after(state, token)
        ends = automaton.after(state, tokenizer().eos_token_id) if state != NO_STATE else state
        return ends == END_OF_TEXT

    written = f"a {start} b<|im_start|>{found.end}12"
    assert allows(written) and allows(f"{found.end}12")
    for other in ("12", "abc", f"abc{found.end}", f"{found.end}12{found.end}12", f"{written} "):
        assert not allows(other), other
    if not name.startswith("cohere"):  # needs another package
        assert parser(name).extract_reasoning(f"{start}ab{found.end}12", ASKED)[1] == "12"
    for text in found.without:
        assert not allows(f"a{text}{found.end}12") or text == found.end


def test_a_request_keeps_the_thought_of_its_first_prompt() -> None:
    """That of `admit`, which knows what vLLM knows about it."""
    got: list[Constraint] = []
    pool = SimpleNamespace(submit=lambda one, *_: got.append(one))
    output = structured(reasoning_parser="qwen3", tokenizer=tokenizer, _pool=pool)
    for prompt, calls in ((Prompt([], True), None), (Prompt([]), None), (Prompt([]), False)):
        token = current.set(HttpRequest(asks_for_calls=calls))
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        output.submit(params, None, prompt)
        output.submit(params, None, Prompt(ids("</think>")))
        current.reset(token)
    tool_call = ("<tool_call>", "</think>")
    expected = [None, Thought("</think>", tool_call), Thought("</think>", tool_call, True)]
    thoughts = [one.thought for one in got]
    assert thoughts[::2] == thoughts[1::2]
    assert [t and (t.end, set(t.without), t.may_be_all) for t in thoughts[::2]] == [
        t and (t.end, set(t.without), t.may_be_all) for t in expected
    ]


def test_refusals_reach_the_client() -> None:
    output = structured(reasoning_parser="granite", tokenizer=tokenizer)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(VLLMValidationError, match="--reasoning-parser granite"):
        output.submit(params, None, Prompt([]))
