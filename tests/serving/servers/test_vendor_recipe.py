"""The command that DiffusionGemma's card gives for vLLM, pasted whole: flags have their effect.

What they override is written into the checkpoint, so that each would be seen to be ignored.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.servers.test_agent_streams import DAYS, FAMILIES
from tests.support.agent_answers import Answer, ask, tool
from tests.support.mistakes_in_requests import image, picture
from tests.support.server import Pool, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CANVAS = 32  # positions, with which the checkpoint was trained
RECOMMENDED = 2.0  # the temperature in the checkpoint's file
WRITTEN = 7  # tokens to which the checkpoint's file would limit an answer
FAMILY = FAMILIES["gemma"]
RECIPE = (
    *("--max-num-seqs", "4", "--generation-config", "vllm", "--enable-prefix-caching"),
    *("--max-logprobs", "32", "--enable-auto-tool-choice"),
    *("--default-chat-template-kwargs", '{"enable_thinking": true}'),
    *("--override-generation-config", '{"max_new_tokens": null}'),
    *("--mm-processor-kwargs", '{"max_soft_tokens": 70}'),
    *("--limit-mm-per-prompt", '{"image": 1, "video": 0}'),
    *("--reasoning-parser", "gemma4", "--tool-call-parser", "gemma4"),
    *("--diffusion-config", json.dumps({"canvas_length": CANVAS})),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = FAMILY.copied_to(tmp_path_factory.mktemp("recipe"))
    write(model / "config.json", canvas_length=2 * CANVAS)
    write(model / "generation_config.json", max_new_tokens=WRITTEN, temperature=RECOMMENDED)
    # Thoughts are off unless they are turned on, as in DiffusionGemma's own template.
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("is false", "is not true"))
    return model


@pytest.fixture
def served(checkpoint: Path, pool: Pool) -> Server:
    return pool.get(checkpoint, *RECIPE)


def chat(server: Server, prompt: str, **options: Any) -> Answer:
    asked = {"max_tokens": 64, "temperature": 0, "seed": 1} | options
    (answer,) = ask(server, "chat", prompt, False, **asked)
    return answer


def write(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_generation_config(served: Server) -> None:
    """The file's temperature does not count."""
    question = "sort 99 12 87 45 63 21 78 34 56 90 11 22"

    def texts(**temperature: float) -> list[list[int]]:
        asked = {"max_tokens": 40, "ignore_eos": True} | temperature
        return [served.complete(question, seed=n, **asked)["token_ids"] for n in range(4)]

    assert texts() == texts(temperature=1.0) != texts(temperature=RECOMMENDED)


def test_canvas_length(served: Server) -> None:
    events = served.stream(list(range(20, 50)), 3 * CANVAS, ignore_eos=True, temperature=0)
    assert [len(event) for event in events] == [CANVAS] * 3


def test_tool_calls(served: Server) -> None:
    """Without the flags a choice of the model's is refused; the family's notation is parsed."""
    options = {"tools": [tool("chat", "f", DAYS)], "tool_choice": "auto"}
    written = FAMILY.written(f"{FAMILY.thought}abxhzwfk5jv")
    answer = chat(served, "copy " + written, **options)
    assert (answer.text, answer.calls) == ("h", [("f", '{"days": 5}')]), answer
    answer = chat(served, "copy abc", **(options | {"tool_choice": "required"}))
    assert [name for name, _ in answer.calls] == ["f"] * len(answer.calls) != []


def test_thoughts(served: Server) -> None:
    """On unless a request turns them off."""
    answer = chat(served, "copy " + FAMILY.written(f"{FAMILY.thought}abxlap"))
    assert (answer.thought, answer.text) == ("ab", "lap")
    answer = chat(served, "copy abcdef", chat_template_kwargs={"enable_thinking": False})
    assert answer.thought == "" and answer.text


def test_max_new_tokens(served: Server) -> None:
    """Nothing limits an answer but the context."""
    asked = {"messages": [{"role": "user", "content": "copy abc"}], "ignore_eos": True}
    usage = served.post("/v1/chat/completions", **asked).json()["usage"]
    assert usage["total_tokens"] == 512 and usage["completion_tokens"] > 10 * WRITTEN


def test_pictures(served: Server) -> None:
    """One a prompt, read as 70 soft tokens at the most."""
    part = picture(900, 900)

    def show(count: int) -> httpx.Response:
        return served.post("/v1/chat/completions", **image(*[part] * count), max_tokens=4)

    none, one = (show(count).json()["usage"]["prompt_tokens"] for count in (0, 1))
    assert 30 < one - none <= 75
    refused = show(2)
    assert refused.status_code == 400 and "image" in refused.text, refused.text
    long = served.post("/v1/chat/completions", **image(picture(8000, 20)), max_tokens=4)
    assert long.status_code == 200, long.text


def test_a_picture_is_sent_again_after_a_request_that_did_not_send_it(served: Server) -> None:
    """One that is refused once its picture has been read, or still waits for its constraint."""

    def show(width: int, **options: Any) -> int:
        asked = image(picture(width, 90)) | {"max_tokens": 4} | options
        return served.post("/v1/chat/completions", **asked).status_code

    endless = {"structured_outputs": {"regex": "(a|b)*a(a|b){26}c"}}
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(show, 101, **endless)
        time.sleep(0.5)
        assert show(101) == 200
        assert not waits.done()
        assert waits.result() == 400
    assert show(102, logit_bias={"99999": 1}) == 400
    assert show(102) == 200


def test_a_picture_is_sent_once_beside_a_constraint_that_is_known(served: Server) -> None:
    asked = image(picture(103, 90)) | {"max_tokens": 8, "structured_outputs": {"regex": "[ab]{2}"}}
    hits = []
    for _ in range(4):  # the first waits for its constraint, so that the second sends again
        hits.append(served.metric("vllm:mm_cache_hits_total"))
        answer = served.post("/v1/chat/completions", **asked)
        assert answer.status_code == 200, answer.text
    assert hits[-1] > hits[-2], hits
