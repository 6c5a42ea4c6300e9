"""The options of a constraint, from a request to the front end's decisions; without an engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from canvas_grammar.grammar.grammars import is_lark
from canvas_grammar_support.grammars import GBNF, LARK
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from vllm_dllm.frontend import Prompt, current
from vllm_dllm.frontend.admission import validate_sampling_params
from vllm_dllm.frontend.front_end import FrontEnd
from vllm_dllm.frontend.http_request import HttpRequest
from vllm_dllm.frontend.structured_output import StructuredOutput
from vllm_dllm.settings.resolution import AUTOMATON, ResolvedRequest, Served
from vllm_dllm.settings.server import DllmSettings

A = StructuredOutputsParams(regex="a")
ASK = [{"role": "user", "content": "a"}]


def served(**settings: Any) -> Served:
    return Served("mask", "LowConfidence", DllmSettings(**settings))


def resolved(
    server: Served, structured: Any = A, maximum: int | None = None, **options: Any
) -> ResolvedRequest:
    extra = {f"diffusion_{name}": value for name, value in options.items()}
    params = SamplingParams(structured_outputs=structured, max_tokens=maximum, extra_args=extra)
    return validate_sampling_params(params, server, own_maximum=maximum is not None)


def test_a_request_s_options_win() -> None:
    found = resolved(served())
    assert (found.constraint_depth, found.constraint_tokens) == (None, 2048)
    server = served(constraint_depth=30, constraint_tokens=99)
    found = resolved(server)
    assert (found.constraint_depth, found.constraint_tokens) == (30, 99)
    found = resolved(server, constraint_depth=20, constraint_tokens=7)
    assert (found.constraint_depth, found.constraint_tokens) == (20, 7)
    assert resolved(server, maximum=500).constraint_tokens is None


def test_options_are_refused_where_they_have_no_effect() -> None:
    for option in ({"constraint_depth": 20}, {"constraint_tokens": 20}):
        with pytest.raises(VLLMValidationError, match="is for requests with a constraint"):
            resolved(served(), structured=None, **option)
    with pytest.raises(VLLMValidationError, match="is for requests without max_tokens"):
        resolved(served(), maximum=9, constraint_tokens=20)
    resolved(served(), structured=None), resolved(served(), maximum=9, constraint_depth=20)


@pytest.mark.parametrize(
    ("request_class", "body", "names"),
    [
        (ChatCompletionRequest, {"messages": ASK}, ("max_tokens", "max_completion_tokens")),
        (ResponsesRequest, {"input": "a"}, ("max_output_tokens",)),
        (CompletionRequest, {"prompt": "a"}, ()),  # vLLM's own, 16, where it gives none
    ],
)
def test_a_maximum_of_the_request_s_own(request_class: Any, body: Any, names: Any) -> None:
    def sets(**more: Any) -> bool:
        return HttpRequest(request=request_class(**body, **more)).sets_its_maximum()

    assert sets() == (not names)
    for name in names:
        assert sets(**{name: 5})
        assert not sets(**{name: None})


def structured(**parts: Any) -> StructuredOutput:
    made = StructuredOutput.__new__(StructuredOutput)
    vars(made).update({"forbids_whitespace": False, "reasoning_parser": "", **parts})
    return made


class Pool:
    """In the place of the compilers: every constraint has this minimum."""

    def __init__(self, minimum: int) -> None:
        self.compiled = SimpleNamespace(minimum=minimum, packed=b"x", require=self.require)
        self.depths: list[int | None] = []

    def submit(self, constraint: Any, patient: bool, client: str) -> Future[Any]:
        assert patient and not client, "offline"
        self.depths.append(constraint.depth)
        future: Future[Any] = Future()
        future.set_result(self.compiled)
        return future

    def require(self, most: int) -> None:
        assert most >= self.compiled.minimum


def made(params: SamplingParams, minimum: int = 3, context: int = 100) -> tuple[Any, Pool]:
    """The parameters of the engine's request, after a prompt of ten tokens."""
    front_end, pool = FrontEnd.__new__(FrontEnd), Pool(minimum)
    front_end.served, front_end.vocabulary_size = served(), 50
    front_end._config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=context))
    front_end.structured = structured(end_tokens=set(), _pool=pool)

    def make(given: SamplingParams) -> Any:
        assert given.structured_outputs is None
        given.max_tokens = given.max_tokens or context
        return SimpleNamespace(sampling_params=given, prompt_token_ids=[0] * 10)

    return front_end.process(make, params).sampling_params, pool


@pytest.mark.parametrize(
    ("maximum", "options", "minimum", "expected"),
    [
        (None, {}, 3, 90),  # what the context leaves
        (None, {"diffusion_constraint_tokens": 20}, 3, 20),
        (None, {"diffusion_constraint_tokens": 20}, 33, 33),
        (50, {"diffusion_constraint_depth": 20}, 3, 50),
    ],
)
def test_what_may_be_put_out(maximum: Any, options: Any, minimum: int, expected: int) -> None:
    params = SamplingParams(structured_outputs=A, max_tokens=maximum, extra_args=dict(options))
    final, pool = made(params, minimum)
    assert final.max_tokens == expected and final.extra_args[AUTOMATON] == b"x"
    assert pool.depths == [options.get("diffusion_constraint_depth")]
    assert params.extra_args == options and params.max_tokens == maximum


def test_a_request_without_a_constraint_is_not_bounded() -> None:
    final, pool = made(SamplingParams(max_tokens=None), context=5000)
    assert final.max_tokens == 4990 and pool.depths == []


@pytest.mark.parametrize("asks", [None, False, True])
def test_optional_calls_yield_to_a_refusal(asks: bool | None) -> None:
    """Their requests are then as without a constraint, unless they ask for one."""
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json={}, disable_additional_properties=True)
    )
    token = current.set(HttpRequest(asks_for_calls=asks))
    try:
        asyncio.run(structured().compiled(params, None, Prompt([]), lambda: None))
        assert asks is False and params.structured_outputs is None
    except VLLMValidationError:
        assert asks is not False
    finally:
        current.reset(token)


@pytest.mark.parametrize(
    "text", [*LARK.values(), *GBNF.values(), "start: X // a ::= b", 'root ::= "# ::="', "#", "a"]
)
def test_the_notation_of_a_grammar_is_told_as_vllm_does(text: str) -> None:
    assert is_lark(text) == grammar_is_likely_lark(text)
