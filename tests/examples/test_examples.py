"""The examples on tiny models, several with one engine.

As a reader runs them, each with an engine of its own: `tests/documents/test_commands_run.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from examples import offline, own_algorithm, several_algorithms, structured_output
from tests.support.checkpoints import TINY_LLADA2
from tests.support.documents.table import OUTCOMES
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


MAINS: dict[str, Callable[[Any], None]] = {
    "offline.py": lambda llm: offline.main(llm, offline.PROMPTS),
    "structured_output.py": structured_output.main,
    "several_algorithms.py": lambda llm: several_algorithms.main(llm, "reverse 52 97 23 71 40"),
    "own_algorithm.py": own_algorithm.main,
}


@pytest.mark.parametrize("name", MAINS)
def test_an_example(name: str, llada2: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    MAINS[name](llada2.llm)
    output = capsys.readouterr().out
    assert re.search(OUTCOMES[name], output, re.DOTALL), output
