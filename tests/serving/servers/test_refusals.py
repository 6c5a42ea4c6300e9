"""Requests that are refused: status 400, by the name of what was typed, streamed or not.

`tests/support/mistakes_in_requests.py` has mistakes in requests for each family.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

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
TRACED = {"vllm_xargs": {"diffusion_trace": True}}
IDS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")
# Each with the endpoints that know the parameter, and a word of the refusal.
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((*OPENAI, TOKENS), {"logit_bias": {str(FAR): 1.0}}, "logit_bias"),
    *(((*TEXT, TOKENS), {name: [FAR]}, name) for name in IDS),
    ((COMPLETIONS, TOKENS), {"logprobs": 50}, "logprobs of 50"),
    ((CHAT,), {"logprobs": True, "top_logprobs": 50}, "logprobs of 50"),
    (
        (RESPONSES,),
        {"include": ["message.output_text.logprobs"], "top_logprobs": 50},
        "logprobs of 50",
    ),
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
    ((COMPLETIONS,), {"stop_token_ids": list(range(272)), "min_tokens": 2}, "min_tokens"),
    ((COMPLETIONS,), {"vllm_xargs": {"diffusion_read_only": 1}}, "diffusion_read_only"),
    ((CHAT,), {"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
    # vLLM drops what its class of Anthropic's requests does not know, our options too.
    ((MESSAGES,), {"threshold": 0.9}, "diffusion_threshold"),
    ((*OPENAI, MESSAGES, TOKENS), {"diffusion_max_steps": 8}, "belongs in vllm_xargs"),
    ((*OPENAI, MESSAGES), {"vllm_xargs": {"diffusion_max_step": 8}}, "diffusion_max_steps"),
    ((RESPONSES, MESSAGES), TRACED, "diffusion_trace has no effect at this endpoint"),
    ((TOKENS,), {"extra_args": {"num_denoising_steps": 1}}, "diffusion_max_steps"),
]


@pytest.mark.parametrize(
    ("path", "options", "word"),
    [
        pytest.param(path, options, word, id=f"{path} {options}"[:60])
        for paths, options, word in REFUSED
        for path in paths
    ],
)
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
    streamed = llada2.post(path, **body, stream=True)
    assert (streamed.status_code, streamed.text) == (400, whole.text)
    assert streamed.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", TEXT)
@pytest.mark.parametrize(
    ("options", "stream", "word"),
    [
        ({"diffusion_trace": True}, True, "diffusion_trace is not supported with stream"),
        ({"diffusion_trace": 2}, False, "diffusion_trace must be true or false"),
        ({"diffusion_replay": True, "diffusion_stream_prefix": True}, False, "remove one of them"),
    ],
)
def test_traces(
    llada2: Server, path: str, options: dict[str, Any], stream: bool, word: str
) -> None:
    answer = llada2.post(path, **ENDPOINTS[path], vllm_xargs=options, stream=stream)
    assert answer.status_code == 400 and word in answer.text, answer.text


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
