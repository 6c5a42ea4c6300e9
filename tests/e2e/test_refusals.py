"""What a diffusion request cannot ask for yet: HTTP 400, with the parameter's name."""

from __future__ import annotations

from typing import Any

import pytest

from tests import oracle
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0.7}, "temperature"),
    "presence_penalty": ({"presence_penalty": 0.5}, "presence_penalty"),
    "frequency_penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "repetition_penalty": ({"repetition_penalty": 1.2}, "repetition_penalty"),
    "min_tokens": ({"min_tokens": 3}, "min_tokens"),
    "logit_bias": ({"logit_bias": {"5": 2.0}}, "logit_bias"),
    "logprobs": ({"logprobs": 2}, "logprobs"),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "bad_words": ({"bad_words": ["t5"]}, "bad_words"),
    "allowed_token_ids": ({"allowed_token_ids": [5, 6]}, "allowed_token_ids"),
    "response_format": ({"response_format": {"type": "json_object"}}, "structured"),
    "structured_outputs": ({"structured_outputs": {"regex": "a+"}}, "structured"),
    "misspelt": ({"vllm_xargs": {"diffusion_treshold": 0.5}}, "diffusion_threshold"),
    "negative": ({"vllm_xargs": {"diffusion_threshold": -1}}, "diffusion_threshold"),
    "text": ({"vllm_xargs": {"diffusion_threshold": "high"}}, "diffusion_threshold"),
    "no-steps": ({"vllm_xargs": {"diffusion_max_steps": 0}}, "diffusion_max_steps"),
    "canvas": ({"vllm_xargs": {"diffusion_canvas_length": 4}}, "diffusion_canvas_length"),
    "read-only": ({"vllm_xargs": {"diffusion_read_only": 1}}, "diffusion_read_only"),
    "beam-search": ({"use_beam_search": True, "n": 2}, ""),
    "empty-prompt": ({"prompt": []}, ""),
    "out-of-vocabulary": ({"prompt": [5, 512]}, ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(server: Server, golden: oracle.Checkpoint, case: str) -> None:
    options, name = REFUSED[case]
    body = {"prompt": golden.prompts["p9"].tokens, "max_tokens": 8} | options
    response = server.post("/v1/completions", **body)
    assert response.status_code == 400, response.text
    assert name in response.text


def test_refused_in_chat(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "t5 t6"}], "max_tokens": 8}
    for options, name in (
        ({"logprobs": True, "top_logprobs": 2}, "logprobs"),
        ({"temperature": 1.0}, "temperature"),
    ):
        response = server.post("/v1/chat/completions", **body, **options)
        assert response.status_code == 400, response.text
        assert name in response.text


def test_server_lives_on(server: Server, golden: oracle.Checkpoint) -> None:
    """Runs after the refusals above, on the same server."""
    assert len(server.complete(golden.prompts["p9"].tokens, 8, ignore_eos=True)["token_ids"]) == 8
    server.wait_until_idle()
