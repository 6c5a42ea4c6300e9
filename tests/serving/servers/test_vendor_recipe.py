"""The command that DiffusionGemma's card gives for vLLM, pasted whole: every flag has its effect.

The other families get it with parsers of their own and without pictures. What the flags override is
written into the checkpoints, so that each would be seen to be ignored.
"""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.families.test_sdar_config import started
from tests.serving.servers.test_agent_streams import (
    DAYS,
    FAMILIES,
    Family,
)
from tests.support.agent_answers import Answer, ask, tool
from tests.support.checkpoints import TINY
from tests.support.mistakes_in_requests import image, picture
from tests.support.server import Pool, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# The canvas lengths that the checkpoints were trained with; their files state others.
CANVAS = {"llada2": 32, "sdar": 4, "gemma": 32}
RECIPE = (
    *("--max-num-seqs", "4", "--generation-config", "vllm", "--enable-prefix-caching"),
    *("--max-logprobs", "32", "--enable-auto-tool-choice"),
    *("--default-chat-template-kwargs", '{"enable_thinking": true}'),
    *("--override-generation-config", '{"max_new_tokens": null}'),
)
PICTURES = (
    *("--mm-processor-kwargs", '{"max_soft_tokens": 70}'),
    *("--limit-mm-per-prompt", '{"image": 1, "video": 0}'),
)
# For each family the temperature of requests that name none; and the one in the checkpoint's file.
NEUTRAL = {"llada2": 0.0, "sdar": 0.0, "gemma": 1.0}
RECOMMENDED = 2.0
# Options that take the most steps.
SLOW = {
    "gemma": {"diffusion_stability_threshold": 1000},
    "llada2": {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 2.0},
}
LENGTH_FIELDS = {"llada2": "block_length", "sdar": "block_size", "gemma": "canvas_length"}
WRITTEN = 7  # tokens to which the checkpoint's file would limit an answer


@dataclass(frozen=True)
class Served:
    name: str
    family: Family
    server: Server

    def ask(self, prompt: str, **options: Any) -> Answer:
        asked = {"max_tokens": 64, "temperature": 0, "seed": 1} | options
        (answer,) = ask(self.server, "chat", prompt, False, **asked)
        return answer


@pytest.fixture(
    scope="module",
    params=["gemma", *(pytest.param(name, marks=pytest.mark.long) for name in ("llada2", "sdar"))],
)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    name = request.param
    model = FAMILIES[name].copied_to(tmp_path_factory.mktemp(name))
    write(model / "config.json", **{LENGTH_FIELDS[name]: 2 * CANVAS[name]})
    write(model / "generation_config.json", max_new_tokens=WRITTEN, temperature=RECOMMENDED)
    # Thoughts are off unless they are turned on, as in DiffusionGemma's own template.
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("is false", "is not true"))
    return name, model


@pytest.fixture
def served(checkpoint: tuple[str, Path], pool: Pool) -> Served:
    name, model = checkpoint
    reasoning, calls = FAMILIES[name].parsers
    flags = (
        *(*RECIPE, "--diffusion-config", json.dumps({"canvas_length": CANVAS[name]})),
        *("--reasoning-parser", reasoning, "--tool-call-parser", calls),
        *(PICTURES if name == "gemma" else ()),
    )
    return Served(name, FAMILIES[name], pool.get(model, *flags))


def write(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_max_num_seqs(served: Served) -> None:
    asked = {"prompt": "sort 1 2", "max_tokens": 96, "ignore_eos": True, "temperature": 0}
    asked["vllm_xargs"] = SLOW.get(served.name, SLOW["llada2"])
    seen = []
    with ThreadPoolExecutor(6) as pool:
        asks = [pool.submit(served.server.post, "/v1/completions", **asked) for _ in range(6)]
        while not all(one.done() for one in asks):
            names = "vllm:num_requests_running", "vllm:num_requests_waiting"
            seen.append(tuple(served.server.metric(name) for name in names))
            time.sleep(0.02)
    assert all(one.result().status_code == 200 for one in asks)
    assert max(running for running, _ in seen) == 4 and (4, 2) in seen


def test_generation_config(served: Served) -> None:
    """The file's temperature does not count."""
    question = "sort 99 12 87 45 63 21 78 34 56 90 11 22"

    def texts(**temperature: float) -> list[list[int]]:
        asked = {"max_tokens": 40, "ignore_eos": True} | temperature
        return [served.server.complete(question, seed=n, **asked)["token_ids"] for n in range(4)]

    assert texts() == texts(temperature=NEUTRAL[served.name]) != texts(temperature=RECOMMENDED)


def test_canvas_length(served: Served) -> None:
    """An answer is streamed by canvases; the first one of an aligned family has prompt tokens."""
    prompt, canvas = list(range(20, 50)), CANVAS[served.name]
    events = served.server.stream(prompt, 3 * canvas, ignore_eos=True, temperature=0)
    first = canvas if served.name == "gemma" else canvas - len(prompt) % canvas
    assert [len(event) for event in events][:3] == [first, canvas, canvas]


def test_prefix_caching(served: Served) -> None:
    prompt = [20 + n * n % 199 for n in range(300)]
    for hits in (False, True):
        before = served.server.metric("vllm:prefix_cache_hits_total")
        served.server.complete(prompt, 4, temperature=0)
        assert (served.server.metric("vllm:prefix_cache_hits_total") > before) == hits


def test_max_logprobs(served: Served) -> None:
    choice = served.server.complete("copy abc", 4, logprobs=32, ignore_eos=True, temperature=0)
    assert all(len(top) >= 32 for top in choice["logprobs"]["top_logprobs"])
    asked = {"prompt": "copy abc", "max_tokens": 4, "logprobs": 33}
    refused = served.server.post("/v1/completions", **asked)
    assert refused.status_code == 400 and "32" in refused.text, refused.text


def test_tool_calls(served: Served) -> None:
    """Without the flags a choice of the model's is refused; the family's notation is parsed."""
    options = {"tools": [tool("chat", "f", DAYS)], "tool_choice": "auto"}
    written = served.family.written(f"{served.family.thought}abxhzwfk5jv")
    answer = served.ask("copy " + written, **options)
    assert (answer.text, answer.calls) == ("h", [("f", '{"days": 5}')]), answer
    answer = served.ask("copy abc", **(options | {"tool_choice": "required"}))
    assert [name for name, _ in answer.calls] == ["f"] * len(answer.calls) != []


def test_thoughts(served: Served) -> None:
    """On unless a request turns them off."""
    thought = served.family.thought
    answer = served.ask("copy " + served.family.written(f"{thought}abxlap"))
    assert (answer.thought, answer.text) == ("ab", "lap")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = served.ask("copy abcdef", **off)
    assert answer.thought == "" and answer.text


def test_max_new_tokens(served: Served) -> None:
    """Nothing limits an answer but the context."""
    asked = {"messages": [{"role": "user", "content": "copy abc"}], "ignore_eos": True}
    usage = served.server.post("/v1/chat/completions", **asked).json()["usage"]
    assert usage["total_tokens"] == 512 and usage["completion_tokens"] > 10 * WRITTEN


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("tiny-llada2", WRITTEN),
        pytest.param("tiny-sdar", WRITTEN, marks=pytest.mark.long),
        # Of this family's files vLLM never reads it.
        pytest.param("tiny-diffusiongemma", None, marks=pytest.mark.long),
    ],
)
def test_a_null_removes_a_recommendation(model: str, limit: int | None, tmp_path: Path) -> None:
    """Also without ``--generation-config vllm``, which removes all of them."""
    file = shutil.copy(TINY / model / "generation_config.json", tmp_path)
    write(Path(file), max_new_tokens=WRITTEN)
    for override, wanted in (({}, limit), ({"max_new_tokens": None}, None)):
        config = started(
            TINY / model, generation_config=str(tmp_path), override_generation_config=override
        )
        assert config.model_config.get_diff_sampling_param().get("max_tokens") == wanted


@pytest.mark.parametrize("checkpoint", ["gemma"], indirect=True)
def test_pictures(served: Served) -> None:
    """One a prompt, read as 70 soft tokens at the most."""
    part = picture(900, 900)

    def show(count: int) -> httpx.Response:
        return served.server.post("/v1/chat/completions", **image(*[part] * count), max_tokens=4)

    none, one = (show(count).json()["usage"]["prompt_tokens"] for count in (0, 1))
    assert 30 < one - none <= 75
    refused = show(2)
    assert refused.status_code == 400 and "image" in refused.text, refused.text
    long = served.server.post("/v1/chat/completions", **image(picture(8000, 20)), max_tokens=4)
    assert long.status_code == 200, long.text
    for url, complaint in (
        ("x.png", "The URL must be either a HTTP, data or file"),
        ("data:image/png;base64,AAAA", "cannot identify image"),
    ):
        refused = served.server.post("/v1/chat/completions", **image(url), max_tokens=4)
        assert refused.status_code == 400 and complaint in refused.text, refused.text
