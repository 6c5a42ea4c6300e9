"""Prefill on one engine, decode on another: tokens are those of a plain engine.

Also where keys and values cannot be loaded, or requests lose them: a page is computed, or its
request ends with an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.families import AHEAD, FUSED, dllm
from tests.support.long import long_but
from vllm_dllm.kv_transfer import connector
from vllm_dllm.kv_transfer.pages import page_addresses

pytestmark = pytest.mark.engine

PAGE = 32
# 0 to 3 pages and more, which end with a page, behind it, inside it and inside a block.
LENGTHS = (1, 31, 32, 33, 47, 64, 65, 90, 96, 97, 127, 128)
Answers = list[tuple[list[int], str]]


class Model(NamedTuple):
    path: Path
    length: int
    options: dict[str, Any]


MODELS = {
    "llada2": Model(TINY_LLADA2, 32, {}),
    "sdar": Model(TINY_SDAR, 4, {}),
    "gemma": Model(TINY_GEMMA, 32, TEXT_ONLY_OPTIONS),
}
APART = dllm(fused_commit="off")
MASKED = {
    "sync, fused": dllm(fused_commit="on"),
    "sync, apart": APART,
    "async, two blocks": FUSED,
    "async, apart": AHEAD | APART,
}
CHUNKS = {"max_num_batched_tokens": 72, "max_num_seqs": 2}
WAYS: dict[str, dict[str, Any]] = {
    "llada2": MASKED | {"plain": {}, "chunks": CHUNKS},
    "sdar": MASKED | {"plain": {}, "chunks": CHUNKS | AHEAD},
    "gemma": {
        "plain": {},
        "async": AHEAD,
        "chunks": CHUNKS,
        "reference": dllm(window="reference"),
        "async, reference": AHEAD | dllm(window="reference"),
    },
}
EVERY_WAY = [(name, way) for name, ways in WAYS.items() for way in ways]


def prompts(lengths: Iterable[int] = LENGTHS, seed: int = 5) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(20, 120) for _ in range(n)] for n in lengths]


def files_in(folder: Path, role: str = "kv_both") -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def start(model: Model, transfer: dict[str, Any] | None = None, **options: Any) -> Any:
    if transfer is not None:
        options["kv_transfer_config"] = transfer
    return engine(model.path, model.length, **(model.options | {"block_size": PAGE} | options))


def answers(running: Engine, asked: list[list[int]], max_tokens: int = 40) -> Answers:
    return running.generate(asked, [greedy(max_tokens, ignore_eos=True, seed=1)] * len(asked))


def loads_of(running: Engine) -> list[Any]:
    """Grows by a page for each that is loaded."""
    return count_calls(running.runner.kv_connector.kv_connector, "_load")


def pages_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*.safetensors"))


def assert_idle(running: Engine) -> None:
    """Nothing is held, once the step in flight has come back: till then vLLM keeps its pages."""
    while running.core.batch_queue:
        running.step()
    running.assert_idle()
    assert not running.scheduler.connector.prompts


@pytest.mark.parametrize(("name", "way"), long_but([("llada2", "plain")], EVERY_WAY))
def test_prefill_here_decode_there(name: str, way: str, tmp_path: Path) -> None:
    """A plain engine, one that saves, and one that loads."""
    model, folder, options, asked = MODELS[name], tmp_path, WAYS[name][way], prompts()
    with start(model, **options) as running:
        wanted = answers(running, asked)
    with start(model, files_in(folder, "kv_producer"), **options) as running:
        loads = loads_of(running)
        assert answers(running, asked, max_tokens=1) == [(one[:1], "length") for one, _ in wanted]
        assert not loads
        assert_idle(running)
    saved = pages_in(folder)
    assert len(saved) == sum(n // PAGE for n in LENGTHS)
    with start(model, files_in(folder, "kv_consumer"), **options) as running:
        loads = loads_of(running)
        assert answers(running, asked) == wanted
        # One token is left to compute.
        assert len(loads) == sum((n - 1) // PAGE for n in LENGTHS)
        assert answers(running, asked) == wanted
        assert_idle(running)
    assert pages_in(folder) == saved


@pytest.mark.long
def test_shared_beginnings(tmp_path: Path) -> None:
    """A prompt loads as many pages as it has in common with another, and saves the others."""
    model = MODELS["sdar"]
    stem, other = prompts((100, 200))
    asked = [stem[:70] + other[:n] for n in (1, 40, 100)]
    with start(model) as running:
        wanted = answers(running, asked)
    with start(model, files_in(tmp_path), enable_prefix_caching=False) as running:
        answers(running, [stem])
        loads = loads_of(running)
        assert answers(running, asked) == wanted
        assert len(loads) == 2 * 3 and len(pages_in(tmp_path)) == 3 + 3
        assert answers(running, asked) == wanted
        assert len(loads) == 2 * 3 + 2 + 3 + 5


# ---- Failures

# The second and the third page of the last one are damaged in turn.
ASKED = prompts((20, 70, 110))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def page_file(running: Engine, prompt: list[int], page: int) -> Path:
    """The file of a page of a prompt."""
    own = running.scheduler.connector
    file: Path = own._file(page_addresses(own.server, None, prompt, PAGE)[page])
    return file


def saved_and_wanted(name: str, folder: Path, **options: Any) -> Answers:
    with start(MODELS[name], files_in(folder, "kv_producer"), **options) as running:
        return answers(running, ASKED)


@pytest.mark.parametrize(
    ("name", "policy", "asynchronous"),
    long_but([("sdar", "recompute", False)], product(MODELS, ("recompute", "fail"), (False, True))),
)
def test_a_damaged_file(name: str, policy: str, asynchronous: bool, tmp_path: Path) -> None:
    """The page behind the first is damaged; then the first one is, too."""
    folder, options = tmp_path, {"async_scheduling": asynchronous}
    wanted = saved_and_wanted(name, folder, **options)
    sound = pages_in(folder)
    transfer = files_in(folder, "kv_both") | {"kv_load_failure_policy": policy}
    options["enable_prefix_caching"] = False
    with start(MODELS[name], transfer, **options) as running:
        for page in (1, 0):
            truncate(page_file(running, ASKED[2], page))
            got = answers(running, ASKED)
            assert got[:2] == wanted[:2], "other requests are not affected"
            if policy == "recompute":
                assert got[2] == wanted[2]
            else:
                assert got[2] == ([], "error")
            # The file is removed, so that the page is saved anew.
            assert answers(running, ASKED) == wanted
            assert_idle(running)
        assert pages_in(folder) == sound


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_file_that_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files may not be removed a request does not try the same page for ever."""
    wanted = saved_and_wanted(name, tmp_path)
    monkeypatch.setattr(connector, "_remove", lambda file: None)
    transfer = files_in(tmp_path, "kv_consumer") | {"kv_load_failure_policy": "recompute"}
    with start(MODELS[name], transfer, enable_prefix_caching=False) as running:
        truncate(page_file(running, ASKED[2], 0))
        loads = loads_of(running)
        assert answers(running, ASKED) == wanted
        assert len(loads) == 2 + 1
        assert_idle(running)


PREEMPTED = {
    "llada2": (APART, AHEAD | APART),
    "sdar": (dllm(fused_commit="on"), FUSED),
    "gemma": ({}, AHEAD),
}


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_load_after_preemption(name: str, asynchronous: int, tmp_path: Path) -> None:
    """A request that comes back finds its pages in files only: nothing is cached here."""
    options: dict[str, Any] = PREEMPTED[name][asynchronous]
    asked = prompts((70, 64, 33, 90, 100, 40, 65, 80))
    with start(MODELS[name], **options) as running:
        wanted = answers(running, asked, 100)
    small = {"num_gpu_blocks_override": 16, "max_model_len": 256, "enable_prefix_caching": False}
    with start(MODELS[name], files_in(tmp_path), **(options | small)) as running:
        loads = loads_of(running)
        preempted = count_calls(running.scheduler, "_preempt_request")
        assert answers(running, asked, 100) == wanted
        assert len(preempted) >= 3 and len(loads) >= 3
        assert_idle(running)


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
def test_aborted_while_it_loads(asynchronous: bool, tmp_path: Path) -> None:
    saved_and_wanted("sdar", tmp_path)
    transfer, options = files_in(tmp_path), {"async_scheduling": asynchronous}
    with start(MODELS["sdar"], transfer, enable_prefix_caching=False, **options) as running:
        llm = running.llm.llm_engine
        for steps in range(5):
            llm.add_request(f"r{steps}", {"prompt_token_ids": ASKED[2]}, greedy(40))
            for _ in range(steps):
                llm.step()
            llm.abort_request([f"r{steps}"])
            for _ in range(3):
                running.step()
            assert_idle(running)
