"""The examples on tiny models, several with one engine.

As a reader runs them, each with an engine of its own: `tests/documents/test_commands_run.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from examples import (
    images,
    offline,
    offline_batch,
    own_algorithm,
    several_algorithms,
    structured_output,
)
from examples.tiny.tasks import held_out_set
from tests.support.checkpoints import TINY_GEMMA, TINY_LLADA2
from tests.support.documents.outcomes import OUTCOMES
from tests.support.engine import Engine, engine
from vllm_dllm.decoding import registry

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def llada2() -> Iterator[Engine]:
    # Other tests of this process know the algorithms of the package only.
    with patch.dict(registry._REGISTRY):
        registry.register_algorithm(own_algorithm.LeftToRight)
        with engine(TINY_LLADA2, 32, disable_log_stats=False) as running:
            yield running


def check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = capsys.readouterr().out
    assert re.search(OUTCOMES[name], output, re.DOTALL), output


MAINS: dict[str, Callable[[Any], None]] = {
    "offline.py": lambda llm: offline.main(llm, offline.PROMPTS),
    "structured_output.py": structured_output.main,
    "several_algorithms.py": lambda llm: several_algorithms.main(llm, "reverse 52 97 23 71 40"),
    "own_algorithm.py": own_algorithm.main,
}


@pytest.mark.parametrize("name", MAINS)
def test_an_example(name: str, llada2: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    MAINS[name](llada2.llm)
    check(name, capsys)


def test_offline_batch(
    llada2: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk at a time; a second run asks only what the first one left."""
    problems = held_out_set(1)
    source, target = tmp_path / "problems.jsonl", tmp_path / "answers.jsonl"
    lines = [json.dumps({"prompt": problem.prompt, "n": n}) for n, problem in enumerate(problems)]
    source.write_text("\n".join(lines[:3]) + "\n")
    offline_batch.main(llada2.llm, source, target, chunk=2, max_tokens=64)
    source.write_text("\n".join(lines) + "\n")
    asked: list[int] = []
    chat = llada2.llm.chat
    monkeypatch.setattr(
        llada2.llm,
        "chat",
        lambda messages, *a, **k: asked.append(len(messages)) or chat(messages, *a, **k),
    )
    offline_batch.main(llada2.llm, source, target, chunk=3, max_tokens=64)
    assert sum(asked) == len(lines) - 3
    assert f"{len(lines)}/{len(lines)}" in capsys.readouterr().err
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["n"] for answer in answers] == list(range(len(lines)))
    right = [a["answer"] == p.answer for a, p in zip(answers, problems, strict=True)]
    assert sum(right) >= len(right) - 2


@pytest.mark.long
def test_images(llada2: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture is in the prompt, and the reader is told that the tiny model does not see it."""
    llada2.assert_idle()
    llada2.close()
    with engine(TINY_GEMMA, 32) as running:
        images.main(running.llm, images.drawn(), "What is in the picture?")
    print(images.BLIND)
    check("images.py", capsys)
