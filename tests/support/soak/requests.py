"""What the soak asks: a mix of requests, all of it drawn from one seed.

Few distinct requests are sent many times, so that each has to be asked alone only once.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.tiny.tasks import held_out_set
from vllm_dllm.decoding import Corruption, get_algorithm
from vllm_dllm.decoding.registry import algorithm_names

ABORTED, MALFORMED = 0.10, 0.05  # shares of what is sent
LONGEST_PROMPT, LONGEST_ANSWER = 180, 140  # characters (bytes to the tiny models), and tokens
LETTERS = string.ascii_letters + string.digits + " "

# Setting of an algorithm -> what it is drawn from, ends included; whole numbers from whole ends.
SETTINGS: Mapping[str, tuple[float, float]] = {
    "threshold": (0.2, 1.0),
    "edit_threshold": (0.0, 0.9),
    "max_post_edit_steps": (0, 8),
    "penalty_lambda": (0.0, 1.0),
    "steps": (1, 40),
    "sub_block_length": (1, 32),
    "entropy_bound": (0.05, 2.0),
    "low": (0.1, 0.5),
    "alpha": (0.0, 1.0),
    "beta": (0.0, 1.0),
    "gamma": (0.1, 1.0),
    "t_min": (0.0, 0.4),
    "t_max": (0.5, 1.0),
    "stability_threshold": (0, 2),
    "confidence_threshold": (0.005, 0.5),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOL_CHOICES: Sequence[Any] = ("auto", "required", TOOL | {"function": {"name": "f"}})
TOOL_TOKENS = 100  # a call fits into them
STOPS = (" ", "7", ["e", "14"], ["ab", "zz"])

# What is changed in a good request, and the word that the refusal has to contain.
WRONG: Sequence[tuple[Mapping[str, Any], str]] = (
    ({"diffusion_unheard_of": 1}, "unheard_of"),
    ({"diffusion_algorithm": "Nobody"}, "Nobody"),
    ({"diffusion_max_steps": 0}, "max_steps"),
    ({"diffusion_max_steps": "many"}, "max_steps"),
    ({"diffusion_entropy_bound": -1.0}, "entropy_bound"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 2.0}, "top_p"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured"),
)


@dataclass(frozen=True)
class Ask:
    """A distinct request, without ``stream``.

    `wrong` is the word that its refusal has to contain; None for a good request.
    """

    name: str
    path: str
    body: Mapping[str, Any]
    wrong: str | None = None


@dataclass(frozen=True)
class Sending:
    """One time that a request is sent.

    Attributes:
        number: its place in the run, from 0.
        leaves: the client goes away after this share of the median answer's time; None: it stays.
    """

    number: int
    ask: Ask
    stream: bool
    leaves: float | None = None

    def __str__(self) -> str:
        how = "streamed" if self.stream else "whole"
        return f"request {self.number} ({self.ask.name}, {how}): {dict(self.ask.body)}"


def draw_pool(
    size: int, corruption: Corruption, seed: int, adapters: Sequence[str] = ()
) -> list[Ask]:
    """`size` distinct good requests for a server with the flags of `models.Model.command`.

    Some of them ask one of the adapters in place of the model.
    """
    draw = random.Random(f"pool {seed}")
    stems = [_text(draw, LONGEST_PROMPT) for _ in range(4)]
    problems = [problem.prompt for problem in held_out_set(20, seed)]
    asks = []
    for number in range(size):
        body: dict[str, Any] = {"max_tokens": draw.randint(1, LONGEST_ANSWER)}
        if draw.random() < 0.4:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": draw.choice(problems)}]
        else:
            path = "/v1/completions"
            # Beginnings that are shared by others, so that the prefix cache has something to find.
            shared = draw.choice(stems)[: draw.randrange(LONGEST_PROMPT)]
            own = LONGEST_PROMPT - len(shared)
            body["prompt"] = shared + _text(draw, draw.randint(1, own))
        body |= _decoding(draw, corruption)
        _add_frontend(draw, body)
        if adapters and draw.random() < 0.4:
            body["model"] = draw.choice(adapters)
        asks.append(Ask(f"ask-{number}", path, body))
    return asks


def draw_plan(requests: int, pool: Sequence[Ask], seed: int) -> list[Sending]:
    """What is sent, in order: the pool again and again, some to be left, some malformed."""
    draw = random.Random(f"plan {seed}")
    plan = []
    for number in range(requests):
        # The pool once in order: nothing in it goes unasked.
        ask = pool[number] if number < len(pool) else draw.choice(pool)
        fate, stream = draw.random(), draw.random() < 0.5
        leaves = draw.uniform(0.0, 0.9) if fate < ABORTED else None
        if ABORTED <= fate < ABORTED + MALFORMED:
            ask = malformed(ask, *draw.choice(WRONG))
        plan.append(Sending(number, ask, stream, leaves))
    return plan


def malformed(ask: Ask, change: Mapping[str, Any], word: str) -> Ask:
    ours = {name: value for name, value in change.items() if name.startswith("diffusion_")}
    # With tools vLLM reads no other constraint, so that a wrong one would not be found.
    good = {name: value for name, value in ask.body.items() if name not in ("tools", "tool_choice")}
    body = {**good, **{n: v for n, v in change.items() if n not in ours}}
    if ours:
        # An algorithm's setting is an error of its own range only where the algorithm has it.
        own = {"diffusion_algorithm": "EntropyBound"}
        body["vllm_xargs"] = own | ours
    return Ask(f"{ask.name} with a wrong {word}", ask.path, body, wrong=word)


def _decoding(draw: random.Random, corruption: Corruption) -> dict[str, Any]:
    """An algorithm with its settings, and sampling that it takes; or what the server has."""
    name = draw.choice([None, *algorithm_names(corruption, of_every_model=True)])
    options: dict[str, Any] = {}
    draws = True
    if name:
        options["diffusion_algorithm"] = name
        algorithm, preset = get_algorithm(name, corruption)
        draws = algorithm.samples
        for setting in () if preset else algorithm.config.ranges():
            options[f"diffusion_{setting}"] = _number(draw, *SETTINGS[setting])
    if draw.random() < 0.3:
        options["diffusion_max_steps"] = draw.randint(1, 32)
    if corruption == "uniform" and draw.random() < 0.2:
        options["diffusion_canvas_length"] = draw.randint(8, 32)
    # Random canvases come from the seed, too: without one no answer would come twice.
    body: dict[str, Any] = {"seed": draw.randrange(2**31), "vllm_xargs": options}
    greedy = not draws or draw.random() < 0.4
    body["temperature"] = 0.0 if greedy else _number(draw, 0.2, 1.5)
    if not greedy and draw.random() < 0.4:
        body |= draw.choice(({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}))
    if draw.random() < 0.4:
        body["ignore_eos"] = True
    return body


def _add_frontend(draw: random.Random, body: dict[str, Any]) -> None:
    if "messages" in body and draw.random() < 0.4:
        body |= {"tools": [TOOL], "tool_choice": draw.choice(TOOL_CHOICES)}
        body["max_tokens"] = draw.randint(TOOL_TOKENS, LONGEST_ANSWER)
        body.pop("ignore_eos", None)  # is refused beside a constraint
    elif draw.random() < 0.25:
        body["stop"] = draw.choice(STOPS)
        body["include_stop_str_in_output"] = draw.random() < 0.5
    # Only urgent ones: with less urgent ones than most, a load without pauses leaves them waiting.
    if draw.random() < 0.15:
        body["priority"] = -draw.randint(1, 3)
    if body["temperature"] and draw.random() < 0.2:
        body["n"] = 2


def _number(draw: random.Random, low: float, high: float) -> float:
    if isinstance(low, int) and isinstance(high, int):
        return draw.randint(low, high)
    return round(draw.uniform(low, high), 3)


def _text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(LETTERS, k=length))
