from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import oracle
from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import Server

# The golden tokenizers have no chat template: contents are joined as they are.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def golden() -> oracle.Checkpoint:
    return oracle.checkpoint("ckpt_b_b8")


def flags_of(golden: oracle.Checkpoint, scratch: Path) -> tuple[str, ...]:
    """The flags that a golden checkpoint is served with; its chat template is written there."""
    (scratch / "chat.jinja").write_text(TEMPLATE)
    return (
        *("--diffusion-config", f'{{"canvas_length": {golden.block_size}}}'),
        *("--chat-template", str(scratch / "chat.jinja")),
    )


@pytest.fixture(scope="session")
def server(golden: oracle.Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that most tests share: block length 8, default settings."""
    scratch = tmp_path_factory.mktemp("server")
    flags = flags_of(golden, scratch)
    with Server(golden.path, *flags, log=scratch / "log") as running:
        yield running


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tiny LLaDA2 with a tool parser."""
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("tool_server") / "log"
    with Server(TINY_LLADA2, *flags, log=log) as running:
        yield running
