"""Requests that are refused: status 400, by the name of what was typed, streamed or not.

The tables of mistakes are those of `tests/support/mistakes_in_requests.py`; those in requests for
DiffusionGemma and SDAR are tried in test_gemma.py and test_thoughts.py, on their own servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.mistakes_in_requests import assert_mistakes_are_refused
from tests.support.server import Server

pytestmark = pytest.mark.e2e

USER = [{"role": "user", "content": "copy ab"}]
CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ENDPOINTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "copy ab", "max_tokens": 8},
    CHAT: {"messages": USER, "max_tokens": 8},
    RESPONSES: {"input": "copy ab", "max_output_tokens": 8},
    MESSAGES: {"messages": USER, "max_tokens": 8},
    TOKENS: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 8}},
}
FAR = 10**6
TEXT = (COMPLETIONS, CHAT)
OPENAI = (*TEXT, RESPONSES)
EDITS = {"diffusion_algorithm": "JointThreshold", "diffusion_max_post_edit_steps": 65536}
JSON = {"type": "json_object"}
# Each with the endpoints that know the parameter, and a word of the refusal.
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((*OPENAI, TOKENS), {"logit_bias": {str(FAR): 1.0}}, "logit_bias"),
    ((*TEXT, TOKENS), {"stop_token_ids": [FAR]}, "stop_token_ids"),
    ((*TEXT, TOKENS), {"logprob_token_ids": [FAR]}, "logprob_token_ids"),
    ((*TEXT, TOKENS), {"allowed_token_ids": [FAR]}, "allowed_token_ids"),
    ((COMPLETIONS, TOKENS), {"logprobs": 50}, "logprobs of 50"),
    ((CHAT,), {"logprobs": True, "top_logprobs": 50}, "logprobs of 50"),
    (
        (RESPONSES,),
        {"include": ["message.output_text.logprobs"], "top_logprobs": 50},
        "logprobs of 50",
    ),
    ((*TEXT, TOKENS), {"repetition_penalty": 1e-40}, "repetition_penalty"),
    (
        (*TEXT, TOKENS),
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 3},
        "no token is left",
    ),
    ((COMPLETIONS,), {"prompt": [5, FAR]}, "vocabulary"),
    ((COMPLETIONS,), {"prompt": [[5, 6], [5, FAR]]}, "vocabulary"),
    ((COMPLETIONS,), {"prompt": []}, ""),
    ((MESSAGES,), {"stop_sequences": [""]}, "stop"),
    # Each of these once ended the server, or gave 500.
    ((COMPLETIONS,), {"n": 2, "seed": 2**63 - 1, "temperature": 1}, "seed"),
    ((COMPLETIONS,), {"stop_token_ids": list(range(272)), "min_tokens": 2}, "min_tokens"),
    ((COMPLETIONS,), {"vllm_xargs": EDITS}, "diffusion_max_post_edit_steps must be at most 128"),
    ((COMPLETIONS,), {"vllm_xargs": {"diffusion_read_only": 1}}, "diffusion_read_only"),
    # vLLM would pass the constraint over.
    ((COMPLETIONS, CHAT), {"use_beam_search": True}, "use_beam_search"),
    ((CHAT,), {"response_format": JSON, "ignore_eos": True}, "response_format"),
    # vLLM drops what its class of Anthropic's requests does not know, our options too.
    ((MESSAGES,), {"threshold": 0.9}, "diffusion_threshold"),
    ((*OPENAI, MESSAGES, TOKENS), {"diffusion_max_steps": 8}, "belongs in vllm_xargs"),
    ((*OPENAI, MESSAGES), {"vllm_xargs": {"diffusion_max_step": 8}}, "diffusion_max_steps"),
    # Options of other engines.
    *(
        (paths, {name: {option: 1}}, ours)
        for paths, name in (((*OPENAI, MESSAGES), "vllm_xargs"), ((TOKENS,), "extra_args"))
        for option, ours in (
            ("num_denoising_steps", "diffusion_max_steps"),
            ("dllm_unmasking_strategy", "diffusion_algorithm"),
            ("block_length", "--diffusion-config"),
        )
    ),
]
# What vLLM refuses in every stream, of any model.
NEVER_STREAMED = {"use_beam_search"}


def cases() -> Iterator[Any]:
    for paths, options, word in REFUSED:
        for path in paths:
            yield pytest.param(path, options, word, id=f"{path} {options}"[:60])


@pytest.mark.parametrize(("path", "options", "word"), cases())
def test_a_stream_is_refused_as_the_request_without(
    llada2: Server, path: str, options: dict[str, Any], word: str
) -> None:
    body = ENDPOINTS[path]
    if path == TOKENS:
        body = body | {"sampling_params": body["sampling_params"] | options}
    else:
        body = body | options
    whole = llada2.post(path, **body)
    assert whole.status_code == 400 and word in whole.text, whole.text
    if not NEVER_STREAMED & options.keys():
        streamed = llada2.post(path, **body, stream=True)
        assert (streamed.status_code, streamed.text) == (400, whole.text)
        assert streamed.headers["content-type"] == "application/json"


def test_mistakes(llada2: Server) -> None:
    assert_mistakes_are_refused(llada2, "LLaDA2")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_stream_is_not_disturbed(llada2: Server, path: str) -> None:
    answer = llada2.post(path, **ENDPOINTS[path], stream=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-st")
    assert answer.text.count("data:") > 1


def test_options_of_generate_beside_its_parameters(llada2: Server) -> None:
    answer = llada2.post(TOKENS, **ENDPOINTS[TOKENS], diffusion_max_steps=4)
    assert answer.status_code == 400, answer.text
    assert "diffusion_max_steps belongs in vllm_xargs" in answer.text


def test_a_last_message_of_the_assistant_is_continued(llada2: Server) -> None:
    """As /v1/chat/completions does where it is asked to."""
    begun = [*USER, {"role": "assistant", "content": "a"}]
    body = {"messages": begun, "max_tokens": 8, "temperature": 0}
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    chat = llada2.post(CHAT, **body, **flags).json()
    answer = llada2.post(MESSAGES, **body).json()
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    block = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    body["messages"] = [*USER, {"role": "assistant", "content": [block]}]
    answer = llada2.post(MESSAGES, **body)
    assert answer.status_code == 200, answer.text


def test_scores_of_labels_are_of_the_first_pass(llada2: Server) -> None:
    """`/generative_scoring` of one input has one answer, whatever else the canvas holds."""
    labels, query, items = [97, 98, 99], [5, 6], [[7, 8, 9], [9, 12]]
    body = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": False}
    answers = [llada2.post("/generative_scoring", **body).json()["data"] for _ in range(12)]
    found = {tuple(one["score"] for one in answer) for answer in answers}
    assert len(found) == 1, found
    for item, score in zip(items, found.pop(), strict=True):
        choice = llada2.complete(
            query + item,
            8,
            temperature=0,
            logprobs=3,
            logprob_token_ids=labels,
            vllm_xargs={"diffusion_max_steps": 1},
            return_tokens_as_token_ids=True,
        )
        wanted = math.exp(choice["logprobs"]["top_logprobs"][0][f"token_id:{labels[0]}"])
        assert score == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("field", ["diffusion_algorithm", "name", "regex"])
def test_texts_without_end(llada2: Server, field: str) -> None:
    """Who waits beside such a request waited 2 s, with everybody else."""
    text = "x" * 20_000_000
    options: dict[str, Any] = {
        "diffusion_algorithm": {"vllm_xargs": {field: text}},
        "name": {"vllm_xargs": {f"diffusion_{text}": 1}},
        "regex": {"structured_outputs": {"regex": text}},
    }[field]
    response = llada2.post(COMPLETIONS, **ENDPOINTS[COMPLETIONS], **options)
    assert response.status_code == 400
    assert len(response.text) < 2000
