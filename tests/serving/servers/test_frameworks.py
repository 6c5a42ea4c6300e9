"""What clients' libraries make of structured output and tools, against a real server."""

from __future__ import annotations

import json
from typing import Annotated, Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.clients.page import blocks
from tests.support.clients.servers import COMPLAINT, check, misspell, run_here
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ASK: list[Any] = [{"role": "user", "content": "Who?"}]
BUDGET = 250  # tokens; those of the tiny checkpoint are bytes


class Person(BaseModel):
    """Who it is."""

    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=130)]


@pytest.fixture
def url(llada2: Server) -> str:
    return f"{llada2.url}/v1"


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def book(parameters: Any, strict: bool) -> Any:
    function = {"name": "book", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def person(arguments: str) -> Person:
    return Person.model_validate_json(arguments, strict=True)


def test_openai_parses_a_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="m", messages=ASK, response_format=Person, max_completion_tokens=BUDGET
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_openai_parses_calls(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.parse(
        model="m",
        messages=ASK,
        tools=[openai.pydantic_function_tool(Person)],
        tool_choice=choice,
        max_completion_tokens=BUDGET,
    )
    calls = answer.choices[0].message.tool_calls or []
    assert calls or choice == "auto"
    for call in calls:
        assert isinstance(call.function.parsed_arguments, Person)


def test_openai_parses_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="m", input="Who?", text_format=Person, max_output_tokens=BUDGET
    )
    assert isinstance(answer.output_parsed, Person)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "choice",
    ["required", pytest.param({"type": "function", "name": "book"}, marks=pytest.mark.long)],
    ids=str,
)
def test_openai_s_responses_call_tools(client: openai.OpenAI, choice: Any, strict: bool) -> None:
    schema = Person.model_json_schema() | {"additionalProperties": False}
    tool: Any = {"type": "function", "name": "book", "parameters": schema, "strict": strict}
    answer = client.responses.create(
        model="m", input="Who?", tools=[tool], tool_choice=choice, max_output_tokens=BUDGET
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    for call in calls:
        person(call.arguments)


def test_openai_s_grammar(client: openai.OpenAI) -> None:
    grammar = 'start: sum\nsum: sum "+" atom | atom\natom: /[0-9]/ | "(" sum ")"'
    answer = client.chat.completions.create(
        model="m",
        messages=ASK,
        max_tokens=40,
        extra_body={"structured_outputs": {"grammar": grammar}},
    )
    assert isinstance(eval(answer.choices[0].message.content or "", {}), int)


@pytest.mark.parametrize("strict", [True, False])
def test_calls_that_are_optional(client: openai.OpenAI, strict: bool) -> None:
    """Free text, and calls in it that are valid and finished once they are begun."""
    tool = book(Person.model_json_schema(), strict)
    for seed in range(6):
        answer = client.chat.completions.create(
            model="m", messages=ASK, tools=[tool], temperature=1.5, seed=seed, max_tokens=BUDGET
        )
        message = answer.choices[0].message
        assert "<tool_call>" not in (message.content or "")
        for call in message.tool_calls or []:
            person(call.function.arguments)


def test_a_tool_whose_parameters_are_not_supported(client: openai.OpenAI) -> None:
    """It takes any object, unless it is strict."""
    different = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 7}
    schema = {"type": "object", "properties": {"a": different}}
    asked: Any = {"model": "m", "messages": ASK, "tool_choice": "required", "max_tokens": BUDGET}
    answer = client.chat.completions.create(**asked, tools=[book(schema, strict=False)])
    for call in answer.choices[0].message.tool_calls or []:
        assert isinstance(json.loads(call.function.arguments), dict)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(**asked, tools=[book(schema, strict=True)])


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_s_structured_output(url: str, method: Any) -> None:
    model = ChatOpenAI(base_url=url, api_key="none", model="m", max_tokens=BUDGET)
    chain = model.with_structured_output(Person if method != "json_mode" else None, method=method)
    answer = chain.invoke("Who?")
    assert isinstance(answer, dict if method == "json_mode" else Person)


def test_langchain_s_tools(url: str) -> None:
    model = ChatOpenAI(base_url=url, api_key="none", model="m", max_tokens=BUDGET)
    (call, *_) = model.bind_tools([Person], tool_choice="required").invoke("Who?").tool_calls
    assert call["name"] == "Person"
    Person.model_validate(call["args"], strict=True)
    for call in model.bind_tools([Person]).invoke("Who?").tool_calls:
        Person.model_validate(call["args"], strict=True)


def test_langchain_s_agents_stop_in_front_of_observations(url: str) -> None:
    """Agents of the kind ReAct send a text that ends an output, and may have tools as well."""
    model = ChatOpenAI(base_url=url, api_key="none", model="m", max_tokens=BUDGET, seed=1)
    bound = model.bind_tools([Person]).bind(stop=["\nObservation:"], temperature=1.5)
    answer = bound.invoke("Who?")
    assert answer.response_metadata["finish_reason"] in ("stop", "tool_calls", "length")
    for call in answer.tool_calls:
        Person.model_validate(call["args"], strict=True)


@pytest.mark.parametrize("native", [True, False])
def test_pydantic_ai(url: str, native: bool) -> None:
    """Its own way is a required call of a tool."""
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="none"))
    output = NativeOutput(Person) if native else ToolOutput(Person)
    agent: Any = Agent(model, output_type=output, model_settings={"max_tokens": BUDGET})
    assert isinstance(agent.run_sync("Who?").output, Person)


@pytest.mark.parametrize("name", ["OpenAI", "Anthropic", "LangChain", "Pydantic AI"])
def test_the_page_of_clients(llada2: Server, name: str) -> None:
    """The code of docs/clients.md, which hands on options, too: a misspelt one is refused."""
    block = blocks()[name]
    check(run_here(block, llada2.url, "m"))
    with pytest.raises(Exception, match=COMPLAINT):
        run_here(misspell(block), llada2.url, "m")
