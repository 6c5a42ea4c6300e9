"""Whatever refuses a request refuses its stream before the first byte, with the same answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.checkpoints import TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.server import Server

pytestmark = pytest.mark.e2e

CHAT = [{"role": "user", "content": "copy ab"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "copy ab", "max_tokens": 8},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 8},
    "/v1/responses": {"input": "copy ab", "max_output_tokens": 8},
    "/v1/messages": {"messages": CHAT, "max_tokens": 8},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 8}},
}
FAR = 10**6
COMPLETION, TEXT = ("/v1/completions",), ("/v1/completions", "/v1/chat/completions")
OPENAI, TOKENS = (*TEXT, "/v1/responses"), ("/inference/v1/generate",)
# Each with the endpoints that know the parameter, and a word of the refusal.
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((*OPENAI, *TOKENS), {"logit_bias": {str(FAR): 1.0}}, "logit_bias"),
    ((*TEXT, *TOKENS), {"stop_token_ids": [FAR]}, "stop_token_ids"),
    ((*TEXT, *TOKENS), {"logprob_token_ids": [FAR]}, "logprob_token_ids"),
    ((*TEXT, *TOKENS), {"allowed_token_ids": [FAR]}, "allowed_token_ids"),
    (COMPLETION, {"logprobs": 50}, "logprobs of 50"),
    (TOKENS, {"logprobs": 50}, "logprobs of 50"),
    (("/v1/chat/completions",), {"logprobs": True, "top_logprobs": 50}, "logprobs of 50"),
    (
        ("/v1/responses",),
        {"include": ["message.output_text.logprobs"], "top_logprobs": 50},
        "logprobs of 50",
    ),
    ((*TEXT, *TOKENS), {"repetition_penalty": 1e-40}, "repetition_penalty"),
    (
        (*TEXT, *TOKENS),
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 3},
        "no token is left",
    ),
    (COMPLETION, {"prompt": [5, FAR]}, "vocabulary"),
    (COMPLETION, {"prompt": [[5, 6], [5, FAR]]}, "vocabulary"),
    (("/v1/messages",), {"stop_sequences": [""]}, "stop"),
    # Options of other engines.
    *(
        (paths, {name: {option: 1}}, ours)
        for paths, name in (((*OPENAI, "/v1/messages"), "vllm_xargs"), (TOKENS, "extra_args"))
        for option, ours in (
            ("num_denoising_steps", "diffusion_max_steps"),
            ("dllm_unmasking_strategy", "diffusion_algorithm"),
            ("block_length", "--diffusion-config"),
        )
    ),
]


@pytest.fixture(
    scope="module",
    params=[
        TINY_LLADA2,
        pytest.param(TINY_GEMMA, marks=pytest.mark.long),
        pytest.param(TINY_SDAR, marks=pytest.mark.long),
    ],
    ids=lambda path: path.name,
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(request.param, "--enable-scale-out", log=log) as running:
        yield running


def cases() -> Iterator[Any]:
    for paths, options, word in REFUSED:
        for path in paths:
            yield pytest.param(path, options, word, id=f"{path} {options}"[:60])


@pytest.mark.parametrize(("path", "options", "word"), cases())
def test_a_stream_is_refused_as_the_request_without(
    server: Server, path: str, options: dict[str, Any], word: str
) -> None:
    body = ENDPOINTS[path]
    if path in TOKENS:
        body = body | {"sampling_params": body["sampling_params"] | options}
    else:
        body = body | options
    whole = server.post(path, **body)
    streamed = server.post(path, **body, stream=True)
    assert (whole.status_code, streamed.status_code) == (400, 400), (whole.text, streamed.text)
    assert word in whole.text
    assert streamed.text == whole.text
    assert streamed.headers["content-type"] == "application/json"
    server.wait_until_idle()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_stream_is_not_disturbed(server: Server, path: str) -> None:
    answer = server.post(path, **ENDPOINTS[path], stream=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-st")
    assert answer.text.count("data:") > 1


@pytest.mark.parametrize("nested", [False, True])
def test_generate_refuses_misplaced_options(server: Server, nested: bool) -> None:
    wrong = {"diffusion_max_steps": 4}
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 8} | (wrong if nested else {})}
    answer = server.post("/inference/v1/generate", **body, **({} if nested else wrong))
    assert answer.status_code == 400, answer.text
    assert "diffusion_max_steps belongs in vllm_xargs" in answer.text


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    """As /v1/chat/completions does where it is asked to."""
    begun = [*CHAT, {"role": "assistant", "content": "a"}]
    body = {"messages": begun, "max_tokens": 8, "temperature": 0}
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    chat = server.post("/v1/chat/completions", **body, **flags).json()
    answer = server.post("/v1/messages", **body).json()
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    block = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    body["messages"] = [*CHAT, {"role": "assistant", "content": [block]}]
    answer = server.post("/v1/messages", **body)
    assert answer.status_code == 200, answer.text
