"""Prefill on one engine, decode on another: tokens are those of a plain engine."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.child import in_child
from tests.support.engine import Engine, count_calls, engine, greedy, settings

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
FUSED = {"additional_config": {"dllm": {"fused_commit": "on"}}}
APART = {"additional_config": {"dllm": {"fused_commit": "off"}}}
ASYNC = {"async_scheduling": True}
MASKED = {
    "sync, fused": FUSED,
    "sync, apart": APART,
    "async, two blocks": ASYNC | FUSED,
    "async, apart": ASYNC | APART,
}
CHUNKS = {"max_num_batched_tokens": 72, "max_num_seqs": 2}
WAYS = {
    "llada2": MASKED | {"chunks": CHUNKS},
    "sdar": MASKED | {"chunks": CHUNKS | ASYNC},
    "gemma": {
        "sync": {},
        "async": ASYNC,
        "chunks": CHUNKS,
        "reference": {"additional_config": {"dllm": {"window": "reference"}}},
        "async, reference": ASYNC | {"additional_config": {"dllm": {"window": "reference"}}},
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


def here_and_there(model: Model, folder: Path, **options: Any) -> None:
    """A plain engine, one that saves, and one that loads."""
    asked = prompts()
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


@pytest.mark.parametrize(
    "name", ["llada2", *(pytest.param(n, marks=pytest.mark.long) for n in ("sdar", "gemma"))]
)
def test_prefill_here_decode_there(name: str, tmp_path: Path) -> None:
    here_and_there(MODELS[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), EVERY_WAY)
def test_every_way(name: str, way: str, tmp_path: Path) -> None:
    here_and_there(MODELS[name], tmp_path, **WAYS[name][way])


def prefilled(path: str, options: dict[str, Any], asked: list[list[int]]) -> Iterator[Any]:
    """One token to each prompt, of an engine with a core in yet another process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM

    llm = LLM(model=path, **(settings(0) | options))
    given = [{"prompt_token_ids": prompt} for prompt in asked]
    done = llm.generate(given, greedy(1, ignore_eos=True, seed=1), use_tqdm=False)
    yield [list(one.outputs[0].token_ids) for one in done]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_another_process(name: str, tmp_path: Path) -> None:
    """The first engine is a process of its own, with the core in a third one."""
    model, asked = MODELS[name], prompts()
    with start(model) as running:
        wanted = answers(running, asked)
    options = {"diffusion_config": {"canvas_length": model.length}, "block_size": PAGE}
    transfer = {"kv_transfer_config": files_in(tmp_path, "kv_producer")}
    in_child(prefilled, model.path, model.options | options | transfer, asked)
    with start(model, files_in(tmp_path, "kv_consumer")) as running:
        loads = loads_of(running)
        assert answers(running, asked) == wanted
        assert len(loads) == sum((n - 1) // PAGE for n in LENGTHS)


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


@pytest.mark.long
def test_what_is_loaded_is_read(tmp_path: Path) -> None:
    """Other numbers under the same address would be seen in the tokens."""
    from vllm_dllm.kv_transfer.page_files import load_page, page_of, save_page

    model, asked = MODELS["gemma"], prompts((96,))
    with start(model, files_in(tmp_path, "kv_producer")) as running:
        wanted = answers(running, asked)
        like = page_of(running.runner.kv_connector.kv_connector.caches, 1)
    for file in pages_in(tmp_path):
        page = load_page(file, file.stem, like)
        save_page(file, file.stem, {k: torch.randn_like(v) for k, v in page.items()})
    with start(model, files_in(tmp_path, "kv_consumer")) as running:
        assert answers(running, asked) != wanted
