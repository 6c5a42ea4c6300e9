"""DiffusionGemma over HTTP, with the committed checkpoint."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from canvas_grammar.grammar.marks import CALL, CALL_END, DELIMITER

from tests.serving.servers.conftest import TOOLS
from tests.support.checkpoints import TEXT_ONLY_FLAGS, TINY_GEMMA
from tests.support.clients.page import blocks
from tests.support.clients.servers import check, run_here
from tests.support.dashboard import missing_metrics
from tests.support.mistakes_in_requests import assert_mistakes_are_refused
from tests.support.server import Pool, Server

pytestmark = pytest.mark.e2e

ASKED = {"messages": [{"role": "user", "content": "sort 61 35 88 14"}], "max_tokens": 64}


def chat(server: Server, **options: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", **(ASKED | options))
    assert response.status_code == 200, response.text
    return response.json()


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_trained_model_answers(gemma: Server) -> None:
    assert text(chat(gemma, temperature=0, seed=42)) == "14 35 61 88"
    assert gemma.metric("vllm:diffusion_num_denoising_steps_total") > 0


def test_the_dashboard_finds_its_metrics(gemma: Server) -> None:
    chat(gemma)
    assert missing_metrics(gemma.url) == []


def test_a_seed_is_an_answer_under_load(gemma: Server) -> None:
    """More than the model was trained for; twelve requests in flight, each seed three times."""
    question = "sort 99 12 87 45 63 21 78 34 56 90 11 22"
    options = {"messages": [{"role": "user", "content": question}], "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda n: text(chat(gemma, seed=n % 4, temperature=2.0, **options)), range(12))
        )
    assert answers[:4] == answers[4:8] == answers[8:]
    assert len(set(answers[:4])) > 1


def test_logprobs(gemma: Server) -> None:
    options = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    content = chat(gemma, **options)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith("14 35 61 88")
    for entry in content:
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["logprob"] == max(
            other["logprob"] for other in entry["top_logprobs"]
        )


def test_request_options(gemma: Server) -> None:
    quick = chat(gemma, vllm_xargs={"diffusion_max_steps": 1}, temperature=0)
    assert quick["usage"]["completion_tokens"] > 0
    chat(gemma, vllm_xargs={"diffusion_entropy_bound": 0.5, "diffusion_t_max": 0.9})


def test_mistakes(gemma: Server) -> None:
    assert_mistakes_are_refused(gemma, "DiffusionGemma")


TOOL = {"type": "function", "function": {"name": "sort", "parameters": {"type": "object"}}}


def test_structured_output(gemma: Server) -> None:
    form = {"structured_outputs": {"regex": "[0-9]{2}( [0-9]{2}){3}"}}
    assert text(chat(gemma, temperature=0, seed=42, **form)) == "14 35 61 88"
    found = text(chat(gemma, response_format={"type": "json_object"}, seed=1, max_tokens=40))
    assert isinstance(json.loads(found), dict)


def test_optional_calls_are_free(gemma: Server) -> None:
    assert text(chat(gemma, tools=[TOOL], temperature=0, seed=42)) == "14 35 61 88"


BOOK = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "seats": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3},
        "window": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "who": {"type": "object", "properties": {"age": {"type": "number"}}, "required": ["age"]},
    },
    "required": ["name", "seats", "window", "who"],
    "additionalProperties": False,
}
BOOKED = {"type": "function", "function": {"name": "book", "parameters": BOOK}}
NAMED = {"type": "function", "function": {"name": "book"}}


@pytest.fixture
def gemma_with_marks(pool: Pool, tmp_path: Path) -> Server:
    """Its tokenizer has the tokens that calls are written with, in the place of others."""
    shutil.copytree(TINY_GEMMA, tmp_path / "model")
    for path in (tmp_path / "model").glob("tokenizer*.json"):
        content = path.read_text(encoding="utf-8")
        marks = (CALL, CALL_END, DELIMITER)
        for other, token in zip(("<|audio>", "<|audio|>", "<audio|>"), marks, strict=True):
            assert json.dumps(other) in content
            content = content.replace(json.dumps(other), json.dumps(token))
        path.write_text(content, encoding="utf-8")
    return pool.get(tmp_path / "model", *TEXT_ONLY_FLAGS, *TOOLS, "gemma4")


@pytest.mark.long
def test_calls_are_marked_by_tokens(gemma_with_marks: Server) -> None:
    for choice in ("required", NAMED):
        options = {"tools": [BOOKED], "tool_choice": choice, "max_tokens": 256, "seed": 2}
        (answer,) = chat(gemma_with_marks, **options, return_token_ids=True)["choices"]
        for call in answer["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), BOOK)
        assert {12, 13, 14} <= set(answer["token_ids"])
    jsonschema.validate(streamed_arguments(gemma_with_marks), BOOK)


@pytest.mark.parametrize(
    "choice",
    ["required", pytest.param(NAMED, marks=pytest.mark.long), "auto"],
    ids=["required", "named", "auto"],
)
def test_calls_are_valid_and_finished(gemma: Server, choice: Any) -> None:
    """VLLM has no structural tag for Gemma's calls; its parser reads what ours allows."""
    for seed in range(4):
        options = {"tools": [BOOKED], "tool_choice": choice, "max_tokens": 256, "seed": seed}
        (answer,) = chat(gemma, **options, temperature=1.5)["choices"]
        calls = answer["message"].get("tool_calls") or []
        assert calls or choice == "auto"
        assert len(calls) == 1 or choice != NAMED
        for call in calls:
            assert call["function"]["name"] == "book"
            jsonschema.validate(json.loads(call["function"]["arguments"]), BOOK)
        assert "<|tool_call>" not in (answer["message"]["content"] or "")


def streamed_arguments(gemma: Server) -> Any:
    body = ASKED | {"tools": [BOOKED], "tool_choice": NAMED, "max_tokens": 256, "stream": True}
    body |= {"model": "m", "seed": 1}
    arguments = ""
    with gemma.client.stream("POST", "/v1/chat/completions", json=body) as events:
        for line in events.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    for call in choice["delta"].get("tool_calls") or []:
                        arguments += call["function"].get("arguments") or ""
    return json.loads(arguments)


def test_a_streamed_call(gemma: Server) -> None:
    jsonschema.validate(streamed_arguments(gemma), BOOK)


def test_calls_with_parameters_that_cannot_be_written(gemma: Server) -> None:
    """VLLM's parser does not follow references, so it would read a text in place of a number."""
    number = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    number["$defs"] = {"n": {"type": "integer"}}
    function = {"name": "f", "parameters": number}
    asked: Any = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    (answer,) = chat(gemma, **asked)["choices"]
    assert isinstance(json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]), dict)
    function["strict"] = True
    refused = gemma.post("/v1/chat/completions", **(ASKED | asked))
    assert refused.status_code == 400 and "Gemma's notation" in refused.text, refused.text


def test_nothing_is_held(gemma: Server) -> None:
    gemma.wait_until_idle()


@pytest.mark.long
@pytest.mark.parametrize("name", ["OpenAI", "Anthropic", "LangChain", "Pydantic AI"])
def test_the_page_of_clients(gemma: Server, name: str) -> None:
    """The code of docs/clients.md, as with LLaDA2 in test_frameworks.py."""
    check(run_here(blocks()[name], gemma.url, "m"))
