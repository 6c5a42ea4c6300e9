"""What a diffusion request cannot ask for: HTTP 400, with the parameter's name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import oracle
from tests.support.server import Server

pytestmark = pytest.mark.e2e

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prompt_logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "bad_words": ({"bad_words": ["t5 t6"]}, "bad_words"),
    "unknown-algorithm": ({"vllm_xargs": {"diffusion_algorithm": "Credits"}}, "'Credit'"),
    "algorithm-path": ({"vllm_xargs": {"diffusion_algorithm": "os:system"}}, "registered name"),
    "foreign-setting": ({"vllm_xargs": {"diffusion_low": 0.5}}, "diffusion_low"),
    "greedy-only": (
        {"temperature": 0.7, "vllm_xargs": {"diffusion_algorithm": "Credit"}},
        "temperature=0.7 is not supported by Credit",
    ),
    "streamed-edits": (
        {"vllm_xargs": {"diffusion_algorithm": "JointThreshold", "diffusion_stream_prefix": 1}},
        "diffusion_stream_prefix",
    ),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format: "),
    "structured_outputs": ({"structured_outputs": {"regex": "a+"}}, "structured"),
    "misspelt": ({"vllm_xargs": {"diffusion_treshold": 0.5}}, "diffusion_threshold"),
    "negative": ({"vllm_xargs": {"diffusion_threshold": -1}}, "diffusion_threshold"),
    "text": ({"vllm_xargs": {"diffusion_threshold": "high"}}, "diffusion_threshold"),
    "no-steps": ({"vllm_xargs": {"diffusion_max_steps": 0}}, "diffusion_max_steps"),
    "canvas": ({"vllm_xargs": {"diffusion_canvas_length": 4}}, "diffusion_canvas_length"),
    "read-only": ({"vllm_xargs": {"diffusion_read_only": 1}}, "diffusion_read_only"),
    # Each of these once ended the server, or gave 500.
    "seed-of-the-second-sample": ({"n": 2, "seed": 2**63 - 1, "temperature": 1}, "seed"),
    "every-token-ends": ({"stop_token_ids": list(range(512)), "min_tokens": 2}, "min_tokens"),
    "beams": ({"use_beam_search": True, "n": 2}, "use_beam_search"),
    "edits": (
        {
            "vllm_xargs": {
                "diffusion_algorithm": "JointThreshold",
                "diffusion_max_post_edit_steps": 65536,
            }
        },
        "diffusion_max_post_edit_steps must be at most 32",
    ),
    "misplaced": ({"diffusion_max_steps": 2}, "diffusion_max_steps belongs in vllm_xargs"),
    "nested": ({"extra_body": {"vllm_xargs": {"diffusion_max_steps": 2}}}, "extra_body"),
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
        ({"response_format": {"type": "json_object"}}, "response_format: "),
        ({"vllm_xargs": {"diffusion_max_step": 1}}, "diffusion_max_steps"),
        ({"use_beam_search": True}, "use_beam_search"),
    ):
        for streamed in (False, True):
            response = server.post("/v1/chat/completions", stream=streamed, **body, **options)
            assert response.status_code == 400, response.text
            assert name in response.text


# VLLM streams no beam search of any model.
SAID_BY_VLLM = {"beams"}


@pytest.mark.parametrize("case", sorted(REFUSED.keys() - SAID_BY_VLLM))
def test_a_stream_is_refused_before_it_begins(
    server: Server, golden: oracle.Checkpoint, case: str
) -> None:
    options, name = REFUSED[case]
    body = {"prompt": golden.prompts["p9"].tokens, "max_tokens": 8, "stream": True} | options
    response = server.post("/v1/completions", **body)
    assert response.status_code == 400, response.text
    assert name in response.text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("threshold", 0.9, "diffusion_threshold"),
        ("diffusion_max_steps", 8, "belongs in vllm_xargs"),
        ("vllm_xargs", {"diffusion_max_step": 8}, "diffusion_max_steps"),
    ],
)
def test_messages_honours_or_refuses(
    server: Server, name: str, value: Any, complaint: str, streamed: bool
) -> None:
    """VLLM drops what its class of Anthropic's requests does not know, our options too."""
    body = {"messages": [{"role": "user", "content": "t5 t6"}], "max_tokens": 8, name: value}
    response = server.post("/v1/messages", stream=streamed, **body)
    assert response.status_code == 400, response.text
    assert name.removeprefix("vllm_xargs") in response.text and complaint in response.text


@pytest.mark.parametrize("field", ["diffusion_algorithm", "name", "regex"])
def test_texts_without_end(server: Server, golden: oracle.Checkpoint, field: str) -> None:
    """Who waits beside such a request waited 2 s, with everybody else."""
    text = "x" * 20_000_000
    options: dict[str, Any] = {
        "diffusion_algorithm": {"vllm_xargs": {field: text}},
        "name": {"vllm_xargs": {f"diffusion_{text}": 1}},
        "regex": {"structured_outputs": {"regex": text}},
    }[field]
    body = {"prompt": golden.prompts["p9"].tokens, "max_tokens": 8} | options
    response = server.post("/v1/completions", **body)
    assert response.status_code == 400
    assert len(response.text) < 2000


def test_server_lives_on(server: Server, golden: oracle.Checkpoint) -> None:
    """Runs after the refusals above, on the same server."""
    assert len(server.complete(golden.prompts["p9"].tokens, 8, ignore_eos=True)["token_ids"]) == 8
    server.wait_until_idle()
