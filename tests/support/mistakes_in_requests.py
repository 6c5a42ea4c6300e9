"""Mistakes in requests, for each family: the answer names what was typed, and the remedy."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from tests.support.mistakes import EVERY, GEMMA, MASKED, MOST_CHARACTERS, Mistake, xargs
from tests.support.server import Server

COMPLETION: dict[str, Any] = {"prompt": "sort 61 35", "max_tokens": 8}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "sort 61 35"}], "max_tokens": 8}
SCHEMA = {"type": "string", "pattern": "(a"}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def picture(width: int, height: int) -> str:
    """A data URL."""
    return url_of(Image.new("RGB", (width, height)))


def url_of(picture: Image.Image) -> str:
    """A data URL."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def image(*urls: str) -> dict[str, Any]:
    """The field of a chat that shows images."""
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*shown, {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": content}]}


# What ``vllm_xargs`` has without the prefix, how the answer calls it, and the remedy. All other
# options and values are those of `tests/settings`, which come to the user by the same way.
OPTIONS: list[tuple[tuple[str, ...], dict[str, Any], str, str]] = [
    (EVERY, {"max_step": 4}, "'diffusion_max_step'", "did you mean 'diffusion_max_steps'"),
    (MASKED, {"algorithm": "lowconfidens"}, "'lowconfidens'", "'LowConfidence'"),
    (GEMMA, {"algorithm": "FixedStep"}, "'FixedStep'; FixedSteps does not fit", "choose"),
    # The option's is the lesser reason.
    (
        GEMMA,
        {"algorithm": "FixedSteps", "steps": 8},
        "FixedSteps does not fit this model",
        "choose",
    ),
    (
        GEMMA,
        {"threshold": 0.9},
        "diffusion_threshold is not a setting of EntropyBound, which has diffusion_confidence_thr",
        "remove it",
    ),
    (GEMMA, {"treshold": 0.9}, "'diffusion_treshold': diffusion_threshold", "remove it"),
    (
        ("LLaDA2",),
        {"low": 0.5},
        "diffusion_low is not a setting of LowConfidence, which has diffusion_threshold",
        "remove it, or set diffusion_algorithm to Hierarchical",
    ),
    (
        MASKED,
        {"t_max": 0.5},
        "diffusion_t_max is not a setting of LowConfidence",
        "remove it",
    ),
    (MASKED, {"read_only": 1}, "diffusion_read_only reads one", "set max_tokens to 1"),
    (MASKED, {"seed_canvas": [5]}, "diffusion_seed_canvas is for models that", "remove it"),
    (
        MASKED,
        {"algorithm": "JointThreshold", "stream_prefix": 1},
        "diffusion_stream_prefix: JointThreshold",
        "remove it, or choose another diffusion_algorithm",
    ),
    (GEMMA, {"stream_prefix": 1}, "diffusion_stream_prefix", "decided; remove it"),
    (GEMMA, {"canvas_length": 99}, "diffusion_canvas_length", "no larger than the served"),
    (GEMMA, {"seed_canvas": [5]}, "diffusion_seed_canvas", "must hold exactly 32 ids"),
    (EVERY, {"pinned": [0]}, "diffusion_pinned", "needs a diffusion_seed_canvas"),
    (EVERY, {"constraint_depth": 99}, "diffusion_constraint_depth is for requests", "remove it"),
]
# Fields of the body.
FIELDS = [
    Mistake(EVERY, {"diffusion_max_steps": 4}, "diffusion_max_steps", "belongs in vllm_xargs"),
    Mistake(EVERY, {"threshold": 0.9}, "threshold is not read", '"diffusion_threshold": ...'),
    Mistake(EVERY, {"vllm_xargs": {"threshold": 0.9}}, "'threshold'", "'diffusion_threshold'"),
    Mistake(EVERY, {"extra_body": xargs(max_steps=4)}, "extra_body", "into the request itself"),
    Mistake(EVERY, {"extra_args": {"diffusion_x": 1}}, "extra_args", '{"vllm_xargs": {...}}'),
    Mistake(EVERY, {"dllm": {"threshold": 0.9}}, "dllm", '{"vllm_xargs":'),
    Mistake(
        MASKED,
        xargs(algorithm="Credit") | {"temperature": 0.7},
        "temperature=0.7 is not supported by Credit",
        "set it to 0",
    ),
    Mistake(
        EVERY,
        {"seed": 2**63 - 1, "n": 2, "temperature": 1},
        "seed plus n - 1",
        "must be at most 2**63 - 1",
    ),
    Mistake(EVERY, {"structured_outputs": {"regex": "(a"}}, "structured_outputs", "missing )"),
    # What diffusion models do not do.
    Mistake(EVERY, {"use_beam_search": True}, "use_beam_search", "remove it, and ask for several"),
    Mistake(EVERY, {"prompt_logprobs": 1}, "prompt_logprobs is not supported", "remove it"),
    Mistake(EVERY, {"echo": True, "logprobs": 1}, "echo with logprobs is not", "remove it"),
    Mistake(EVERY, {"bad_words": ["sort 61"]}, "bad_words", "only words of one token can"),
    Mistake(EVERY, {"thinking_token_budget": 5}, "thinking_token_budget", "remove it"),
]
# In a chat.
CHATS = [
    Mistake(EVERY, {"prompt_logprobs": 1}, "prompt_logprobs is not supported", "remove it"),
    Mistake(EVERY, {"response_format": BAD_FORMAT}, "response_format: ", "missing )"),
]
COMPLETIONS = [*(Mistake(of, xargs(**asked), *said) for of, asked, *said in OPTIONS), *FIELDS]


def assert_mistakes_are_refused(server: Server, family: str) -> None:
    """Post all of a family: readable refusals. The server lives on, and its log has no traceback,

    but for those that vLLM's handlers write for a stream that is refused.
    """
    before = server.log.stat().st_size
    for path, rest, mistakes in (
        ("/v1/completions", COMPLETION, COMPLETIONS),
        ("/v1/chat/completions", CHAT, CHATS),
    ):
        for mistake in mistakes:
            if family in mistake.families:
                _assert_readable(server, path, rest, mistake)
    assert server.complete("sort 61 35", 8)["text"]
    server.wait_until_idle()
    lines = server.log.read_text()[before:].splitlines()
    assert not any("Traceback" in line for line in lines if "[serving.py:" not in line)


def _assert_readable(server: Server, path: str, rest: dict[str, Any], mistake: Mistake) -> None:
    """A stream is refused in the same words, before it begins, but for what vLLM refuses in all."""
    body, heard = rest | mistake.typed, set()
    never_streamed = {"use_beam_search", "prompt_logprobs"} & body.keys()
    for streamed in [False] if never_streamed else [False, True]:
        response = server.post(path, **body, stream=streamed)
        assert response.status_code in (400, 404, 422), (body, response.text)
        heard.add(response.json()["error"]["message"])
    assert len(heard) == 1, (body, heard)
    (message,) = heard
    assert mistake.named in message and mistake.remedy in message, (mistake.typed, message)
    if not mistake.vllm:
        assert "\n" not in message and len(message) <= MOST_CHARACTERS, message
