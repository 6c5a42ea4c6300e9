"""Keys and values that cannot be loaded, requests that lose them, and several connectors.

No wrong token in any case: a page is computed, or its request ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines.test_kv_transfer import (
    APART,
    ASYNC,
    FUSED,
    MODELS,
    PAGE,
    Answers,
    answers,
    assert_idle,
    files_in,
    loads_of,
    pages_in,
    prompts,
    start,
)
from tests.support.engine import Engine, count_calls, greedy

pytestmark = pytest.mark.engine

# The second and the third page of the last one are damaged in turn.
ASKED = prompts((20, 70, 110))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def another(file: Path) -> None:
    (other, *_) = sorted(pages_in(file.parents[1]) - {file})
    file.write_bytes(other.read_bytes())


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "changed": flip,
    "another page": another,
}


def page_file(running: Engine, prompt: list[int], page: int) -> Path:
    """The file of a page of a prompt."""
    from vllm_dllm.kv_transfer.address import page_addresses

    connector = running.scheduler.connector
    file: Path = connector._file(page_addresses(connector.server, None, prompt, PAGE)[page])
    return file


def saved_and_wanted(name: str, folder: Path, **options: Any) -> Answers:
    with start(MODELS[name], files_in(folder, "kv_producer"), **options) as running:
        return answers(running, ASKED)


def damaged(name: str, folder: Path, policy: str, damage: str, **options: Any) -> None:
    """The page behind the first is damaged; then the first one is, too."""
    wanted = saved_and_wanted(name, folder, **options)
    sound = {file: file.read_bytes() for file in pages_in(folder)}
    transfer = files_in(folder, "kv_both") | {"kv_load_failure_policy": policy}
    options["enable_prefix_caching"] = False
    with start(MODELS[name], transfer, **options) as running:
        for page in (1, 0):
            DAMAGES[damage](page_file(running, ASKED[2], page))
            got = answers(running, ASKED)
            assert got[:2] == wanted[:2], "other requests are not affected"
            if policy == "recompute":
                assert got[2] == wanted[2]
            else:
                assert got[2] == ([], "error")
            # The file is removed, so that the page is saved anew.
            assert answers(running, ASKED) == wanted
            assert_idle(running)
        assert pages_in(folder) == set(sound)


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.long)])
def test_a_truncated_file(policy: str, tmp_path: Path) -> None:
    damaged("sdar", tmp_path, policy, "truncated")


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", MODELS)
def test_damage(name: str, damage: str, policy: str, asynchronous: bool, tmp_path: Path) -> None:
    damaged(name, tmp_path, policy, damage, async_scheduling=asynchronous)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_file_that_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files may not be removed a request does not try the same page for ever."""
    from vllm_dllm.kv_transfer import connector

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
    "llada2": (APART, ASYNC | APART),
    "sdar": (FUSED, ASYNC | FUSED),
    "gemma": ({}, ASYNC),
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
