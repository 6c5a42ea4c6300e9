"""Servers that tests share: files with the same checkpoint and flags have one, see `Pool`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import oracle
from tests.support.checkpoints import TEXT_ONLY_FLAGS, TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.server import LIVE_PAGE, Pool, Server

# The golden tokenizers have no chat template: contents are joined as they are.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser")
OPEN = (
    *(*TOOLS, "hermes", "--enable-scale-out"),
    *("--additional-config", '{"dllm": {"constraint_tokens": 30}}'),
)
KEYS = ("the first key", "the second key")
WATCHED = (
    *("--middleware", LIVE_PAGE, "--root-path", "/behind", "--api-key", *KEYS),
    *("--enable-lora", "--max-lora-rank", "8"),
)


HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that share servers follow each other."""
    used: dict[Path, set[str]] = {}
    for item in items:
        used.setdefault(item.path, set()).update(getattr(item, "fixturenames", ()))
    places = [number for number, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted(
        (items[number] for number in places),
        key=lambda item: [name in used[item.path] for name in ("server", "llada2", "watched")],
    )
    for number, item in zip(places, ordered, strict=True):
        items[number] = item


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(tmp_path_factory.mktemp("servers"))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def golden() -> oracle.Checkpoint:
    return oracle.checkpoint("ckpt_b_b8")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def server(pool: Pool, golden: oracle.Checkpoint, template: Path) -> Server:
    """A golden checkpoint with block length 8 and default settings."""
    canvas = json.dumps({"canvas_length": golden.block_size})
    return pool.get(golden.path, "--diffusion-config", canvas, "--chat-template", str(template))


@pytest.fixture
def llada2(pool: Pool) -> Server:
    """Tiny LLaDA2 with a tool parser, all endpoints, and short constrained answers by default.

    Its log has what a user's has; the engines of other tests set a higher level for this process.
    """
    return pool.get(TINY_LLADA2, *OPEN, env={"VLLM_LOGGING_LEVEL": "INFO"})


@pytest.fixture
def watched(pool: Pool) -> Server:
    """The same with the live page of traces, API keys and adapters."""
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    found = pool.get(TINY_LLADA2, *OPEN, *WATCHED, env=environment)
    found.client.headers["Authorization"] = f"Bearer {KEYS[1]}"
    return found


@pytest.fixture
def gemma(pool: Pool) -> Server:
    """Tiny DiffusionGemma without pictures, with its tool parser."""
    return pool.get(TINY_GEMMA, *TEXT_ONLY_FLAGS, *TOOLS, "gemma4")


@pytest.fixture
def sdar(pool: Pool) -> Server:
    """Tiny SDAR with parsers of thoughts and of calls between tags."""
    return pool.get(TINY_SDAR, *TOOLS, "qwen3_coder", "--reasoning-parser", "qwen3")
