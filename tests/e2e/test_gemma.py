"""DiffusionGemma over HTTP, with the committed checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.checkpoints import TINY_GEMMA
from tests.support.server import Server

pytestmark = pytest.mark.e2e

ASKED = {"messages": [{"role": "user", "content": "sort 61 35 88 14"}], "max_tokens": 64}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scratch = tmp_path_factory.mktemp("gemma")
    flags = (
        *("--limit-mm-per-prompt", '{"image": 0, "video": 0}'),
        *("--enable-auto-tool-choice", "--tool-call-parser", "gemma4"),
    )
    with Server(TINY_GEMMA, *flags, log=scratch / "log") as running:
        yield running


def chat(server: Server, **options: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", **(ASKED | options))
    assert response.status_code == 200, response.text
    return response.json()


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_trained_model_answers(gemma: Server) -> None:
    assert text(chat(gemma, temperature=0, seed=42)) == "14 35 61 88"
    assert gemma.metric("vllm:diffusion_num_denoising_steps_total") > 0


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


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"vllm_xargs": {"diffusion_stream_prefix": 1}}, "diffusion_stream_prefix"),
        ({"vllm_xargs": {"diffusion_algorithm": "LowConfidence"}}, "LowConfidence does not fit"),
        ({"structured_outputs": {"regex": "(a"}}, "structured"),
        ({"vllm_xargs": {"diffusion_threshold": 0.5}}, "unknown request option"),
        ({"vllm_xargs": {"diffusion_entropy_bound": 0}}, "diffusion_entropy_bound"),
        ({"vllm_xargs": {"diffusion_canvas_length": 99}}, "diffusion_canvas_length"),
        ({"vllm_xargs": {"diffusion_pinned": [0]}}, "diffusion_pinned"),
        ({"vllm_xargs": {"diffusion_seed_canvas": [5]}}, "diffusion_seed_canvas"),
        ({"vllm_xargs": {"diffusion_entropy_bounds": 1}}, "diffusion_entropy_bound"),
    ],
)
def test_refused_by_name(gemma: Server, options: dict[str, Any], name: str) -> None:
    for streamed in (False, True):
        response = gemma.post("/v1/chat/completions", **(ASKED | options), stream=streamed)
        assert response.status_code == 400, response.text
        assert name in response.text


TOOL = {"type": "function", "function": {"name": "sort", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "sort"}}


def test_structured_output(gemma: Server) -> None:
    form = {"structured_outputs": {"regex": "[0-9]{2}( [0-9]{2}){3}"}}
    assert text(chat(gemma, temperature=0, seed=42, **form)) == "14 35 61 88"
    found = text(chat(gemma, response_format={"type": "json_object"}, seed=1, max_tokens=40))
    assert isinstance(json.loads(found), dict)


def test_optional_calls_are_free(gemma: Server) -> None:
    assert text(chat(gemma, tools=[TOOL], temperature=0, seed=42)) == "14 35 61 88"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("form", [{}, {"response_format": {"type": "json_object"}}], ids=str)
def test_calls_cannot_be_required(gemma: Server, choice: Any, form: Any) -> None:
    """VLLM has no structural tag for Gemma's calls, and would answer with text."""
    options = {"tools": [TOOL], "tool_choice": choice, **form}
    response = gemma.post("/v1/chat/completions", **(ASKED | options))
    assert response.status_code == 400, response.text
    assert "tool_choice" in response.text and "--tool-call-parser" in response.text


def test_nothing_is_held(gemma: Server) -> None:
    gemma.wait_until_idle()
