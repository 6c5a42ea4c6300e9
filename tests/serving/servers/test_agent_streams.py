"""Random requests of agents: a streamed answer is the unstreamed one, on every endpoint.

The models copy letters. In their copies here some letters are named as the marks of thoughts and
calls, so that they write what they are asked for, marks included. Texts are such that vLLM's own
parsers make the same of them at once and token by token; `tests/frontend` tries all others.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers.conftest import TOOLS
from tests.support.agent_answers import Answer, ask, forced, tool
from tests.support.checkpoints import TINY
from tests.support.server import Pool, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENDPOINTS = ("completions", "chat", "responses", "messages")
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
LETTERS = "abcdefghilmnoprsu"


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint, its parsers of thoughts and of calls, and how its agents write.

    Attributes:
        names: what some letters are named. `q` and `x` are around a thought, `z` and `v` around a
            call, `w`, `k` and `j` before, between and after its name and its number.
        prefixes: whether its decided prefixes can be streamed.
    """

    model: str
    parsers: tuple[str, str]
    names: dict[str, str]
    thought: str = "q"
    prefixes: bool = True

    def copied_to(self, folder: Path) -> Path:
        checkpoint = shutil.copytree(TINY / self.model, folder / self.model)
        tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
        vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
        kind = added[0] | {"special": False}
        added = [one for one in added if one["content"] not in self.names.values()]
        for letter, name in self.names.items():
            number = vocabulary.pop(letter)
            if (former := vocabulary.pop(name, None)) is not None:
                vocabulary[f"<|{former}|>"] = former
            vocabulary[name] = number
            added = [one for one in added if one["id"] != number]
            added.append(kind | {"id": number, "content": name, "special": name == "<|im_end|>"})
        tokenizer["added_tokens"] = sorted(added, key=lambda one: one["id"])
        (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
        template = checkpoint / "chat_template.jinja"
        renamed = template.read_text()
        for former in (name for name in self.names if len(name) > 1):
            renamed = renamed.replace(former, self.names[former])
        no_thought = self.written(self.thought + "x")
        off = "{% if enable_thinking is false %}" + no_thought + "{% endif %}"
        template.write_text(renamed.rstrip() + off)
        return checkpoint

    def written(self, letters: str) -> str:
        return "".join(self.names.get(letter, letter) for letter in letters)


QWEN = {"q": "<think>", "x": "</think>", "z": "<tool_call>", "v": "</tool_call>"}
JSON = {"w": '{"name": "', "k": '", "arguments": {"days": ', "j": "}}"}
XML = {"w": "\n<function=", "k": ">\n<parameter=days>\n", "j": "\n</parameter>\n</function>\n"}
GEMMA = {"q": "<|channel>", "y": "thought\n", "x": "<channel|>"}
GEMMA |= {
    "<|turn>model": "<|turn>",
    "z": "<|tool_call>",
    "v": "<tool_call|>",
    "w": "call:",
    "k": "{days:",
    "j": "}",
}
FAMILIES = {
    "llada2": Family(
        "tiny-llada2", ("nemotron_v3", "hermes"), QWEN | JSON | {"<|role_end|>": "<|im_end|>"}
    ),
    "sdar": Family("tiny-sdar", ("qwen3", "qwen3_coder"), QWEN | XML),
    "gemma": Family("tiny-diffusiongemma", ("gemma4", "gemma4"), GEMMA, "qy", prefixes=False),
}


@pytest.fixture(
    scope="module", params=["llada2", "gemma", pytest.param("sdar", marks=pytest.mark.long)]
)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path]:
    family = FAMILIES[request.param]
    return family, family.copied_to(tmp_path_factory.mktemp(request.param))


@pytest.fixture
def served(checkpoint: tuple[Family, Path], pool: Pool) -> tuple[Family, Server]:
    family, path = checkpoint
    reasoning, calls = family.parsers
    return family, pool.get(path, *TOOLS, calls, "--reasoning-parser", reasoning)


def letters(draw: random.Random, family: Family, asked: dict[str, Any]) -> str:
    """What a model is asked to write in an answer with these options, at most 32 tokens.

    A required call is all that is written after the thought, because vLLM's parsers drop other text
    from an unstreamed answer.
    """

    def some(least: int, most: int) -> str:
        return "".join(draw.choices(LETTERS, k=draw.randint(least, most)))

    text, kind = "", draw.random()
    if "chat_template_kwargs" not in asked and kind < 0.7:
        text = family.thought + some(0, 5)
        if kind < 0.1 and "tools" not in asked:
            return text
        text += "x"
    choice = str(asked.get("tool_choice", "none"))
    free = choice in ("none", "auto") or "'auto'" in choice
    text += some(0, 4) if free else ""
    calls = ("tools" in asked) * (draw.choice((0, 1, 1, 2)) if free else 1)
    for _ in range(calls):
        name = "b" if "'b'" in choice else "f" if "'f'" in choice else draw.choice("fb")
        text += f"zw{name}k{draw.randint(0, 99)}jv"
    return (text or some(4, 8))[:32]


def options(draw: random.Random, endpoint: str, family: Family) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": draw.choice((8, 24, 64)), "temperature": 0.0}
    if endpoint != "messages":  # has no seed
        found |= {"temperature": draw.choice((0.0, 0.0, 0.8)), "seed": draw.randrange(1 << 31)}
    if family.prefixes:
        found["vllm_xargs"] = {"diffusion_stream_prefix": draw.random() < 0.5}
    if endpoint != "responses" and draw.random() < 0.4:
        # Not within a mark: vLLM cuts the text of a token there.
        pairs = (a + b for a in LETTERS for b in LETTERS)
        marks = " ".join(family.names.values())
        stop = draw.choice([pair for pair in pairs if pair not in marks])
        found["stop"] = ["never written!", stop]
        if endpoint != "messages":
            found["include_stop_str_in_output"] = draw.random() < 0.5
    if endpoint in ("completions", "chat"):
        if found["temperature"]:  # greedy answers would be equal, and are refused
            found["n"] = draw.choice((1, 2))
        if draw.random() < 0.3:
            found["logprobs"] = 1 if endpoint == "completions" else True
    if endpoint == "completions":
        return found
    if draw.random() < 0.3 and endpoint != "messages":
        found["chat_template_kwargs"] = {"enable_thinking": False}
    choice = draw.choice(("none", "auto", "auto", "auto", "required", "named"))
    if choice in ("required", "named"):  # a call ends the answer
        found.pop("stop", None)
    if choice != "none" or draw.random() < 0.5:
        # With it, vLLM's parsers of calls leave the end token in a stream.
        found.pop("include_stop_str_in_output", None)
        found["max_tokens"] = 64  # calls have to fit
        found["tools"] = [tool(endpoint, name, DAYS) for name in "fb"]
        if choice == "named":
            found["tool_choice"] = forced(endpoint, draw.choice("fb"))
        elif endpoint == "messages":
            found["tool_choice"] = {"type": "any" if choice == "required" else choice}
        else:
            found["tool_choice"] = choice
            found["parallel_tool_calls"] = draw.random() < 0.7
    return found


QUICK, ALL = range(10), range(10, 100)


@pytest.mark.parametrize("seeds", [QUICK, pytest.param(ALL, marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_stream_is_the_answer(served: tuple[Family, Server], endpoint: str, seeds: range) -> None:
    family, server = served
    different: list[Any] = []
    answers: list[Answer] = []
    for seed in seeds:
        draw = random.Random(f"{endpoint} {seed}")
        asked = options(draw, endpoint, family)
        prompt = "copy " + family.written(letters(draw, family, asked))
        whole = ask(server, endpoint, prompt, False, **asked)
        streamed = ask(server, endpoint, prompt, True, **asked)
        answers += whole
        if whole != streamed:
            different.append((seed, prompt, asked, whole, streamed))
    assert different == []
    if endpoint != "completions":
        assert any(answer.thought for answer in answers) and any(answer.calls for answer in answers)
