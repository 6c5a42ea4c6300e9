"""Decisions: tokenizers with the labels of questions, questions at random, and plain references."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.reference import Reference
from tests.support.server import Server

DECISIONS = "/v1/systemone"
KINDS = ("noul", "choice", "score")
# Tokens that a tokenizer of bytes lacks, in place of the characters of bytes that no text has.
LABELS = {"yes": "ŀ", "no": "Ł"}
CHANNEL = {"<|channel>": "ľ", "<channel|>": "Ŀ"}  # DiffusionGemma's
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)
STATE_ALONE = TEMPLATE.replace("m.content", "m.content.partition('\\n\\n')[0]")


def with_tokens(path: Path, words: Mapping[str, str | int], *, swap_case: bool = False) -> Path:
    """Give a tokenizer of bytes tokens for these words, with the id of a character or a new one.

    With `swap_case` lower-case letters have the ids of capital ones, and the other way round.
    """
    file = path / "tokenizer.json"
    stated = json.loads(file.read_text())
    known: dict[str, int] = stated["model"]["vocab"]
    if swap_case:
        known = {
            name.swapcase() if name in string.ascii_letters else name: n
            for name, n in known.items()
        }
    for word, at in words.items():
        number = known[at] if isinstance(at, str) else at
        known = {name: n for name, n in known.items() if n != number} | {word: number}
        stated["added_tokens"] = [one for one in stated["added_tokens"] if one["id"] != number]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        stated["added_tokens"].append({"id": number, "content": word, **flags})
    stated["model"]["vocab"] = dict(sorted(known.items(), key=lambda each: each[1]))
    stated["added_tokens"].sort(key=lambda each: each["id"])
    file.write_text(json.dumps(stated))
    return path


def with_bytes(path: Path, of: Path, words: Mapping[str, str | int]) -> Path:
    """Give a checkpoint the tokenizer of another one, with these words, labels and a template."""
    shutil.copy(of / "tokenizer.json", path)
    stated = json.loads((of / "tokenizer_config.json").read_text())
    stated.pop("mask_token")
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    turns = dict(zip(("<user>", "<system>", "<reply>"), range(270, 273), strict=True))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return with_tokens(path, LABELS | turns | words)


def question(chance: random.Random, kind: str) -> dict[str, Any]:
    """A question of a type, about nothing."""
    options = [text(chance, 3) for _ in range(chance.randint(2, 5))]
    criteria: dict[str, Any] = {
        "noul": chance.choice([None, {"true": text(chance, 3)}]),
        "choice": dict.fromkeys(options, chance.choice([None, text(chance, 4)])),
        "score": options,
    }
    return {"type": kind, "instructions": text(chance, 6), "criteria": criteria[kind]}


def text(chance: random.Random, most: int) -> str:
    """Up to so many words of small letters."""
    letters, words = string.ascii_lowercase + string.digits, range(chance.randint(1, most))
    return " ".join("".join(chance.choices(letters, k=chance.randint(1, 7))) for _ in words)


def questions_about(state: str, count: int, chance: random.Random) -> dict[str, Any]:
    """A request of so many questions, of all types in turn."""
    specs = {f"q{n}": question(chance, KINDS[n % 3]) for n in range(count)}
    return {"state": state, "questions": specs}


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Random states, each with a question of each type."""
    chance = random.Random(seed)
    return [
        {"state": text(chance, 9), "questions": {kind: question(chance, kind) for kind in KINDS}}
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Read:
    """What a server says about one question."""

    probabilities: list[float]
    label_mass: float
    argmax_is_label: bool

    def assert_is(self, other: Read, within: float = 1e-5) -> None:
        assert self.probabilities == pytest.approx(other.probabilities, rel=0, abs=within)
        assert self.label_mass == pytest.approx(other.label_mass, rel=0, abs=within)
        assert self.argmax_is_label == other.argmax_is_label


def decide(server: Server, body: dict[str, Any]) -> dict[str, Read]:
    """The answers to a request for decisions, by question."""
    answer = server.post(DECISIONS, **body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return {
        name: Read([*one["probabilities"].values()], **found["diagnostics"][name])
        for name, one in found["answers"].items()
    }


def asked(name: str, spec: dict[str, Any]) -> Any:
    """A question as vLLM has it: its labels, and what its model reads after the state."""
    from vllm_dllm.vllm_seams.decisions import questions

    given = (spec.get(field) for field in ("type", "instructions", "criteria"))
    return questions.build_question(name, *given, 26)


def first_position(reference: Reference, prompt: Sequence[int]) -> torch.Tensor:
    """The logits ``[vocabulary]`` at the first masked position after a prompt, in a plain pass."""
    known, block = list(prompt), reference.block
    if reference.shifted and len(known) % block == 0:
        return reference.logits(known)[-1]
    start = len(known) - len(known) % block if reference.aligned else len(known)
    canvas = known + [reference.mask] * (start + block - len(known))
    return reference.logits(canvas, start)[len(known) - reference.shifted]


def by_reference(reference: Reference, prompt: Sequence[int], labels: Sequence[int]) -> Read:
    """What a plain pass of the reference says about a question."""
    logits = first_position(reference, prompt)
    own = logits[list(labels)]
    mass = float(logits.softmax(-1)[list(labels)].sum())
    logits = logits.index_fill(0, torch.tensor(reference.mask), -torch.inf)
    return Read(own.softmax(-1).tolist(), mass, int(logits.argmax()) in labels)


def by_hand(server: Server, content: Any, labels: list[str], ids: Tokenizer, **more: Any) -> Read:
    """A decision by DiffusionGemma that its client asks for itself, as a read of a canvas of 16."""
    thought, vocabulary = "<|channel>thought\n<channel|>", 272
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": thought}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    body |= {"return_token_ids": True, "max_tokens": 2} | more
    prompt = server.post("/v1/chat/completions", **body).json()["prompt_token_ids"]
    before = prompt[: -len(ids.encode(thought, add_special_tokens=False).ids)]
    noise = random.Random(hashlib.sha256(json.dumps(before).encode()).digest())
    canvas = [noise.randrange(vocabulary), ids.token_to_id("<turn|>")]
    options = {"seed_canvas": canvas + [0] * 14, "canvas_length": 16, "max_steps": 1}
    options["read_only"] = 1
    asked_for = [ids.token_to_id(label) for label in labels]
    body |= {"logprobs": True, "logprob_token_ids": asked_for, "return_tokens_as_token_ids": True}
    body["vllm_xargs"] = {f"diffusion_{name}": to for name, to in options.items()}
    answer = server.post("/v1/chat/completions", **body).json()["choices"][0]
    of_first = answer["logprobs"]["content"][0]["top_logprobs"]
    found = {one["token"]: one["logprob"] for one in of_first}
    own = torch.tensor([found[f"token_id:{label}"] for label in asked_for])
    is_label = answer["token_ids"][0] in asked_for
    return Read(own.softmax(-1).tolist(), float(own.exp().sum()), is_label)
