"""Decisions: typed questions about a state, answered with probabilities from one pass."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.serving.engines.test_gemma_native import picture
from tests.support import reference_gemma, reference_llada2
from tests.support.adapters import adapter
from tests.support.checkpoints import ROOT, TINY_LLADA2, TINY_SDAR
from tests.support.commands import run
from tests.support.decisions import (
    CHANNEL,
    DECISIONS,
    LABELS,
    Read,
    asked,
    bodies,
    by_hand,
    by_reference,
    decide,
    questions_about,
    with_bytes,
    with_tokens,
)
from tests.support.families import FAMILIES
from tests.support.long import long_but
from tests.support.reference import Reference
from tests.support.server import Pool, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STATES = 200
BLOCK = 8
PICTURES = ("--limit-mm-per-prompt", '{"image": 1, "video": 0}')
CHOICE = {"type": "choice", "instructions": "which?", "criteria": {"a": "x", "b": None}}


def together(server: Server, every: list[dict[str, Any]]) -> list[dict[str, Read]]:
    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(lambda body: decide(server, body), every))


def assert_answered(
    server: Server, every: list[dict[str, Any]], wanted: list[dict[str, Read]]
) -> None:
    """Alone, and eight at a time."""
    for found in ([decide(server, body) for body in every], together(server, every)):
        for mine, others in zip(found, wanted, strict=True):
            assert mine.keys() == others.keys()
            for name, read in mine.items():
                read.assert_is(others[name])


def assert_state_is_read_once(server: Server) -> None:
    """64 questions at once, with pages of 32 tokens."""
    body = questions_about("abcdefgh" * 16, 64, random.Random(5))
    hits = "vllm:prefix_cache_hits_total"
    before = server.metric(hits)
    found = decide(server, body)
    assert server.metric(hits) - before >= 63 * len(body["state"])
    singles = {name: body | {"questions": {name: body["questions"][name]}} for name in found}
    for name in [*found][::8]:
        found[name].assert_is(decide(server, singles[name])[name])


# ---- DiffusionGemma


@pytest.fixture(scope="module")
def gemma_with_labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    reference_gemma.random_checkpoint(path, seed=1, sliding_window=48)
    adapter(path, path / "adapter", 1)
    return with_tokens(path, LABELS | CHANNEL)


@pytest.fixture
def ours(pool: Pool, gemma_with_labels: Path) -> Server:
    lora = ("--enable-lora", "--lora-modules", f"adapted={gemma_with_labels / 'adapter'}")
    pages = ("--block-size", "32", "--prefix-cache-retention-interval", "32")
    return pool.get(gemma_with_labels, *PICTURES, *lora, *pages)


@pytest.fixture
def vllms_own(pool: Pool, gemma_with_labels: Path) -> Server:
    native = {"VLLM_DLLM_NATIVE": "1", "TORCH_COMPILE_DISABLE": "1"}
    return pool.get(gemma_with_labels, *PICTURES, env=native)


def test_gemma_answers_as_vllms_own_class(ours: Server, vllms_own: Server) -> None:
    every = [*bodies(STATES, seed=1), questions_about("a state", 64, random.Random(5))]
    wanted = [decide(vllms_own, body) for body in every]
    assert "vllm_dllm" not in vllms_own.log.read_text()
    assert_answered(ours, every, wanted)


def _shown(seed: int) -> str:
    file = io.BytesIO()
    picture(seed).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_gemma_with_pictures_and_an_adapter(
    ours: Server, vllms_own: Server, gemma_with_labels: Path
) -> None:
    """As the same read that a client asks of either class by itself."""
    ids = Tokenizer.from_file(str(gemma_with_labels / "tokenizer.json"))
    labels, body = ["A", "B"], {"state": "a state", "questions": {"q": CHOICE}}
    content = f"a state\n\n{asked('q', CHOICE).type.prompt(asked('q', CHOICE))}"
    found = [decide(ours, body)["q"], decide(ours, body | {"model": "adapted"})["q"]]
    found[0].assert_is(by_hand(vllms_own, content, labels, ids))
    found[1].assert_is(by_hand(ours, content, labels, ids, model="adapted"))
    for shown in map(_shown, (1, 2)):
        parts = [
            {"type": "image_url", "image_url": {"url": shown}},
            {"type": "text", "text": content},
        ]
        found.append(decide(ours, body | {"images": [shown]})["q"])
        found[-1].assert_is(by_hand(vllms_own, parts, labels, ids))
    assert len({round(read.probabilities[0], 6) for read in found}) == 4, "something has no effect"


def test_gemma_reads_a_state_once(ours: Server) -> None:
    assert_state_is_read_once(ours)


# ---- masked models


MASK = "<|mask|>"
# How each family is served, and how its tokenizer spells the mask; no setting may matter.
SERVED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "llada2": ({"algorithm": "JointThreshold-Q"}, (), MASK),
    "llada2.2": ({}, (), MASK),
    "sdar": ({"fused_commit": "on"}, ("--async-scheduling",), MASK),
    "sdar with experts": ({"blocks": 4}, (), MASK),
    "diffcoder": ({"skip_last_commit": False}, (), "<[MASK_TOKEN]>"),
    "nemotron": ({"algorithm": "LinearSpec"}, (), MASK),
    "fast-dllm": ({"execution": "sync", "skip_last_commit": False}, (), "|<MASK>|"),
}


def written(name: str, path: Path) -> Reference:
    """Write a checkpoint of random weights; the reference for it."""
    if name != "llada2":
        FAMILIES[name].make(path, BLOCK)
        return FAMILIES[name].reference(path)
    reference_llada2.random_checkpoint(path, 1, mask_token_id=299, block_length=BLOCK)
    return reference_llada2.Reference.load(path, BLOCK, 299)


@pytest.mark.parametrize("name", long_but(["llada2"], SERVED))
def test_masked_models_answer_as_their_reference(pool: Pool, tmp_path: Path, name: str) -> None:
    settings, flags, mask = SERVED[name]
    reference = written(name, tmp_path)
    with_bytes(tmp_path, TINY_SDAR, {mask: reference.mask})
    configured = ("--additional-config", json.dumps({"dllm": settings}), *flags)
    server = pool.get(tmp_path, *configured, "--block-size", "32")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    every, wanted, prompts = bodies(STATES, seed=2), [], []
    for body in every:
        reads = {}
        for name, spec in body["questions"].items():
            one = asked(name, spec)
            prompt = f"<user>{body['state']}\n\n{one.type.prompt(one)}<reply>"
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
            prompts.append(ids)
            labels = [tokenizer.token_to_id(label) for label in one.labels]
            reads[name] = by_reference(reference, ids, labels)
        wanted.append(reads)
    assert {len(ids) % BLOCK for ids in prompts} == {*range(BLOCK)}
    assert_answered(server, every, wanted)
    assert_state_is_read_once(server)
    for ids in prompts[::60]:  # the reads have left nothing but the prompts in the cache
        tokens = server.complete(ids, 12, temperature=0)["token_ids"]
        assert tokens == server.complete(ids, 12, temperature=0, cache_salt="other")["token_ids"]
    server.wait_until_idle()


# ---- what tiny-llada2 knows


def test_tiny_llada2_answers_what_it_knows(pool: Pool, tmp_path: Path) -> None:
    """200 questions of each type, of which at most two are answered wrongly.

    It was trained on no question but knows answers, so its tokens get other names: capital letters
    are those that were small ones, but "yes" and "no" are "y" and "n". Its template shows the state
    alone. Asked is what a text begins with that it is to copy, and the first digit of a result.
    """
    path = shutil.copytree(TINY_LLADA2, tmp_path / "renamed")
    with_tokens(path, {"yes": "Y", "no": "N", "Y": "ŀ", "N": "Ł"}, swap_case=True)
    copy = "COPyes "  # as the renamed tokens spell it
    template = (path / "chat_template.jinja").read_text()
    shown = template.replace("message.content", "message.content.partition('\\n\\n')[0]")
    (path / "chat_template.jinja").write_text(shown)
    server, chance = pool.get(path), random.Random(3)
    letters = "ABCDEFGHIJKLM"
    kinds = {"noul": None, "choice": dict.fromkeys(letters), "score": [*"0123456789"]}
    bodies, right = [], []
    for n in range(STATES):
        others = "".join(chance.choices(letters, k=chance.randint(4, 24)))
        answer, letter = chance.choice(["yes", "no"]), chance.choice(letters)
        a, b = sorted((chance.randrange(100), chance.randrange(100)))
        states = f"{copy}{answer}{others}", f"{copy}{letter}{others}", f"{b} {'+-'[n % 2]} {a}"
        right += [answer == "no", letters.index(letter), int(str(b - a if n % 2 else b + a)[0])]
        bodies += [
            {"state": state, "questions": {"q": {"type": kind, "criteria": criteria}}}
            for state, (kind, criteria) in zip(states, kinds.items(), strict=True)
        ]
    found = [read["q"].probabilities for read in together(server, bodies)]
    wrong = [read[best] != max(read) for read, best in zip(found, right, strict=True)]
    assert max(sum(wrong[n::3]) for n in range(3)) <= 2, [sum(wrong[n::3]) for n in range(3)]


# ---- beside other requests, and refusals


@pytest.mark.parametrize("name", ["llada2", "gemma"])
def test_other_requests_keep_their_tokens(
    request: pytest.FixtureRequest, pool: Pool, name: str
) -> None:
    server = request.getfixturevalue("llada2" if name == "llada2" else "ours")
    prompts = [[30 + n, 40, 50 + n, *range(60, 60 + n)] for n in range(16)]
    asked = {"temperature": 0.8, "seed": 3, "ignore_eos": True}

    def complete(prompt: list[int]) -> list[int]:
        return server.complete(prompt, 96, **asked)["token_ids"]

    with ThreadPoolExecutor(32) as clients:
        alone = list(clients.map(complete, prompts))
        running = clients.map(complete, prompts)
        specs = {f"q{n}": CHOICE for n in range(16)}
        reads = list(
            clients.map(lambda n: decide(server, {"state": f"s{n}", "questions": specs}), range(8))
        )
        assert list(running) == alone
    decide(server, {"state": "s3", "questions": {"q0": CHOICE}})["q0"].assert_is(reads[3]["q0"])


MANY = {"type": "choice", "criteria": {f"option {n}": None for n in range(27)}}
REFUSED = [
    ({"questions": {"q": {"type": "noul"}}}, "label 'yes' is not one distinct token"),
    ({"questions": {"q": MANY}}, "at most 26 options"),
    ({"questions": {f"q{n}": CHOICE for n in range(65)}}, "at most 64"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "thinking must be off"),
    ({"state": "x" * 2000}, "maximum"),
    ({"images": ["data:,"]}, "image"),
    ({"diffusion_threshold": 0.5}, "diffusion_threshold"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_what_cannot_be_answered_is_refused(
    llada2: Server, change: dict[str, Any], reason: str
) -> None:
    answer = llada2.post(DECISIONS, **{"state": "x", "questions": {"q": CHOICE}} | change)
    assert answer.status_code == 400 and reason in answer.text, answer.text


def test_the_example_of_a_client(llada2: Server) -> None:
    script = ROOT / "examples" / "clients" / "with_decisions.py"
    done = run(sys.executable, str(script), env=os.environ | {"URL": llada2.url})
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["route:", "anger:"]


def test_a_server_that_answers_no_decisions_says_why(pool: Pool, gemma: Server) -> None:
    body = {"state": "x", "questions": {"q": CHOICE}}
    of_logits = pool.get(TINY_LLADA2, "--logprobs-mode", "raw_logits")
    for server, reason in ((of_logits, "--logprobs-mode raw_logits"), (gemma, "label 'yes'")):
        answer = server.post(DECISIONS, **body)
        assert answer.status_code == 501 and reason in answer.text, answer.text
